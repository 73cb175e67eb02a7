"""Dot-product attention over a quantised cache of keys and values, and the quantisation itself."""

from impls.quantized_kv.attention import IMPLEMENTATIONS, attention
from impls.quantized_kv.cache import quantize

__all__ = ["IMPLEMENTATIONS", "attention", "quantize"]
