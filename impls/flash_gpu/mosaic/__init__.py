"""Mosaic GPU kernels for Hopper.

Each module builds on the ones before: `impls.pallas_gpu.mosaic_tiles` (operations), `mosaic_launch` (sizes, order of
tiles, copies), `mosaic_masks`, `forward`, `backward_tiles`, `split_dkv` and `backward` (kernels).
"""
