"""Storage forms: how the operands of a problem lie in memory, and the cases that kernels of each form are judged on."""
