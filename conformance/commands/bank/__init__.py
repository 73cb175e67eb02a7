"""Implement `sensitivity`, which measures the gate on a bank of planted bugs, with `--signatures`."""
