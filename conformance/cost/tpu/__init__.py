"""Cycles of TPU kernels, read from the schedules that the compiler writes."""
