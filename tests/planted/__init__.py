"""Bugs that real projects have had, planted in correct kernels one at a time."""
