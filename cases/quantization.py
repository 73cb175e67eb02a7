"""Quantise keys and values to the small numbers that a cache stores, with scales, and dequantise them."""

from __future__ import annotations

import ml_dtypes
import numpy as np

STORED: dict[str, np.dtype] = {
    "int8": np.dtype(np.int8),
    "int4": np.dtype(ml_dtypes.int4),
    "fp8": np.dtype(ml_dtypes.float8_e4m3fn),
}
GRANULARITIES = ("token", "head")
KV_CACHES = tuple(f"kv{kind}-{by}" for kind in STORED for by in GRANULARITIES)
"""Quantised caches as case ids name them. `kvint8-token` has int8 numbers and a scale for each token and head."""
PAGED_CACHES = ("kvint8-token", "kvfp8-token")
"""Quantised caches in pages with a scale for each token and head, as JAX's `paged_attention` takes them."""
WHOLE_CACHES = ("kvint8-tensor", "kvfp8-tensor")
"""Quantised caches in pages with one scale for all keys and one for all values: JAX's `ragged_paged_attention`."""
PAGES_HOLD = (None, *PAGED_CACHES, *WHOLE_CACHES)
"""The quantised caches that pages may hold; None stands for keys and values in the dtype of the operands."""
_LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
_BY_DTYPE = {dtype: _LARGEST[kind] for kind, dtype in STORED.items()}


def find_largest(dtype: np.dtype) -> float | None:
    """Return the largest stored number of a dtype, or None if it is not one of `STORED`."""
    return _BY_DTYPE.get(np.dtype(dtype))


def get_stored_dtype(cache: str) -> np.dtype:
    """Return the dtype that `cache` stores."""
    return STORED[cache.removeprefix("kv").split("-")[0]]


def quantize(x: np.ndarray, cache: str) -> tuple[np.ndarray, np.ndarray]:
    """Quantise `x [B, S, K, D]` as `cache` names it.

    Returns:
      the stored numbers `[B, S, K, D]`, and f32 scales: `[B, S, K]` by token, `[1, 1, K]` by head, or `[]` by tensor.
    """
    kind, by = cache.removeprefix("kv").split("-")
    exact = x.astype(np.float64)
    axes = {"token": (3,), "head": (0, 1, 3), "tensor": (0, 1, 2, 3)}[by]
    peak = np.abs(exact).max(axis=axes, keepdims=True)
    scales = np.where(peak == 0, 1.0, peak / _LARGEST[kind]).astype(np.float32)
    scaled = exact / scales
    if kind != "fp8":
        scaled = np.rint(scaled)
    stored = np.clip(scaled, -_LARGEST[kind], _LARGEST[kind]).astype(STORED[kind])
    return stored, scales.reshape(()) if by == "tensor" else scales[..., 0]


def dequantize(stored: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the stored numbers times their scales, in float64."""
    return stored.astype(np.float64) * scales.astype(np.float64)[..., None]


def compute_half_steps(stored: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Compute the largest rounding error of quantisation, in float64.

    It is half a scale for integers. For fp8 it is the scale times half the spacing of fp8 numbers just above the stored
    number.
    """
    scale = scales.astype(np.float64)[..., None]
    if stored.dtype != STORED["fp8"]:
        return np.broadcast_to(scale / 2, stored.shape)
    size = np.abs(stored.astype(np.float64))
    exponent = np.floor(np.log2(np.maximum(size, 2.0**-6)))  # subnormal below 2**-6
    return scale * 2.0 ** (exponent - 4)
