"""Mosaic GPU kernels for Hopper: `mosaic_shape`, then `mosaic_launch` and `mosaic_tiles`, then one module per pass."""
