"""The kernels by Triton, for every GPU from Ampere on."""
