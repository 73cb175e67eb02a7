"""The kernels by Triton, for every GPU from Ampere on: `launch`, then `tiles`, then one module for each pass."""
