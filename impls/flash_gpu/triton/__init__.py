"""Triton kernels for GPUs from Ampere on.

Each module builds on the ones before: `impls.pallas_gpu.triton_tiles` (loads and stores), `triton_program` (what a
program sees and computes), `forward` and `backward` (kernels).
"""
