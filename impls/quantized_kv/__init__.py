"""Dot-product attention over a quantised cache of keys and values, and the quantisation itself."""

from impls.quantized_kv.attention import attention, quantize
from impls.quantized_kv.implementation import IMPLEMENTATIONS

__all__ = ["IMPLEMENTATIONS", "attention", "quantize"]
