"""Implement the sub-commands of `python -m conformance`, one module each, and the code that they share."""
