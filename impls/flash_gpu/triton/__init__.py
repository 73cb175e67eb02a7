"""Triton kernels for GPUs from Ampere on: `triton_launch`, then `triton_tiles`, then one module per pass."""
