"""Parts that the Pallas kernels for GPUs share, for Triton and for Mosaic GPU."""
