"""Measure the cost of kernels: time, memory, and cycles counted from machine code without a chip.

This package is optional: the core does not import it.
"""
