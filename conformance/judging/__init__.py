"""Judge implementations: plan cases and checks, run them in processes, judge failures again, and record the results."""
