"""Read what the bank of planted bugs measured, and name the planted bugs that fail as a kernel does."""
