"""Implement the commands `bench`, `tune` and `cycles` of `python -m conformance`."""
