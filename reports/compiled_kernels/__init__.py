"""Figures that compilers' outputs give of kernels: TPU schedules, estimates of calls, bounds of GPU kernels."""
