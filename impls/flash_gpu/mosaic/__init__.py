"""Mosaic GPU kernels for Hopper.

Each module builds on the ones before: `mosaic_shape` (sizes), `tile_order` and `tensor_core_turns` (scheduling),
`mosaic_launch`, `mosaic_tiles` (operations), `forward` and `backward` (kernels).
"""
