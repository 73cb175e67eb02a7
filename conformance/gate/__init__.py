"""The pytest gate: its options, what it tells pytest and JUnit files, and whether all that was planned was judged."""
