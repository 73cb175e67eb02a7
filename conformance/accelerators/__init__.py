"""Judge TPU and GPU kernels on a machine without the chip: compile them for it, and run them in JAX's interpreters."""
