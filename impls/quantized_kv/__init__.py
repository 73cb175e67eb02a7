"""Dot-product attention over a quantised cache of keys and values, and the quantisation itself."""

from impls.quantized_kv.attention import attention
from impls.quantized_kv.implementation import IMPLEMENTATIONS
from impls.quantized_kv.kv_quantization import quantize

__all__ = ["IMPLEMENTATIONS", "attention", "quantize"]
