"""The kernels by Mosaic GPU, for Hopper."""
