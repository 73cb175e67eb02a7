"""Accelerators: generations of TPUs and GPUs, their compilers and interpreters, the size of programs."""
