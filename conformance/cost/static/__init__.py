"""Choose block sizes by cycles estimated from compiler output, and compare kernels with recorded estimates."""
