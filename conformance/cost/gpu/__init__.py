"""Figures and lower bounds of cycles, read from the machine code of GPU kernels."""
