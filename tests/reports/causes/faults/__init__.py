"""Kernels with faults, and what a run of each said: whether findings name the faults and nothing else."""
