"""Judge cases beside those of a run: to confirm what a failure depends on, and to find a smaller one."""
