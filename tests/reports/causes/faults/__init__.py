"""Kernels with known faults, and records of their runs: findings must name these faults and nothing else."""
