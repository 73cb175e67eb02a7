"""Parts of the pytest gate: its options, its output for the terminal and JUnit files, and its test of completeness."""
