"""Bound the cycles of GPU kernels by their machine code."""
