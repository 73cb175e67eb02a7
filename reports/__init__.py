"""Reports: pages and summaries made of records and nothing else."""
