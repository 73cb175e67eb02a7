"""Decode attention over a padded cache with a length for each sequence: plain JAX, Pallas for TPU and for GPU."""

from impls.ragged.attention import attention, compute_parts
from impls.ragged.implementation import IMPLEMENTATIONS, build_implementation

__all__ = ["IMPLEMENTATIONS", "attention", "build_implementation", "compute_parts"]
