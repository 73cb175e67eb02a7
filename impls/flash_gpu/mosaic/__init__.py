"""Mosaic GPU kernels for Hopper.

Each module builds on the ones before: `mosaic_shape` (sizes), `tile_order` and `tensor_core_turns` (scheduling),
`mosaic_launch`, `mosaic_tiles` (operations), `dead_keys` (operands), `forward`, `backward_tiles`, `split_dkv` and
`backward` (kernels).
"""
