"""Decode attention over a padded cache with a length for each sequence: plain JAX, Pallas for TPU and for GPU."""

from impls.ragged.attention import attention, parts
from impls.ragged.implementation import IMPLEMENTATIONS, implementation

__all__ = ["IMPLEMENTATIONS", "attention", "implementation", "parts"]
