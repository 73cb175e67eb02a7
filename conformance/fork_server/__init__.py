"""Start processes quickly: fork them from a server process that has loaded JAX once and computes nothing itself."""
