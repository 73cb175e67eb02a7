"""What compilers made of kernels: TPU schedules and whole calls, and bounds of GPU kernels."""
