"""A run: which cases are judged under which checks, in which order and processes, and what the records say."""
