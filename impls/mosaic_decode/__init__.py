"""Mosaic GPU kernel of decode attention on Hopper, for paged caches and for padded ones.

`decode_shape` has the sizes and what is supported, `share_kernel` the kernel.
"""
