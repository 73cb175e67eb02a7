"""Cases beside those of a run: to confirm what is suspected of a failure, and to find a smaller one that fails so."""
