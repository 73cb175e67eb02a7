"""The commands of the cost package, one module each."""
