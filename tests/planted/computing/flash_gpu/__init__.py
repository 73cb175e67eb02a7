"""Bugs in copies of the flash kernels for GPUs, each one passage of their source changed."""
