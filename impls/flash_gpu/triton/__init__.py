"""Triton kernels for GPUs from Ampere on.

Each module builds on the ones before: `triton_launch` (grid and block specs), `triton_tiles` (operations), `forward`
and `backward` (kernels).
"""
