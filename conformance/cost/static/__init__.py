"""Choose block sizes by static cycles, and compare kernels with recorded ones."""
