"""Estimate the cycles of TPU kernels by their schedules."""
