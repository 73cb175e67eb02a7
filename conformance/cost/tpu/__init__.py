"""Estimate the cycles of TPU kernels from the schedules that their compiler writes."""
