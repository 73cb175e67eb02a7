"""Parts that the Pallas kernels for TPUs share."""
