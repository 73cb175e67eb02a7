"""Measure what kernels cost: time, static cycles, memory. Optional: the core does not import this package."""
