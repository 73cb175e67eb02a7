"""Compute lower bounds on the cycles of GPU kernels from their machine code."""
