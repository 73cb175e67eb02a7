"""The kernels by Mosaic GPU, for Hopper: `shape`, then `launch` and `tiles`, then one module for each pass."""
