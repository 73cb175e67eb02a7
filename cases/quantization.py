"""Keys and values as a cache stores them: small numbers, and the scales that they are to be multiplied by.

Symmetric, as caches have it (KIVI, arXiv:2402.02750, section 3, without its zero points): `stored = round(x / scale)`
with `scale = max |x| / largest`, where the maximum is that of one token and head (`"token"`), that of a head over all
tokens and batch rows (`"head"`), or that of all keys or all values (`"tensor"`), as a calibration before serving gives
them. The last is a number, and the others are arrays.
"""

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
"""How a case id names them: `kvint8-token`."""
PAGED_CACHES = ("kvint8-token", "kvfp8-token")
"""Those that lie in pages: what published kernels take (JAX's `paged_attention`), a scale of each token and head."""
WHOLE_CACHES = ("kvint8-tensor", "kvfp8-tensor")
"""Those with one number for all keys and one for all values, as JAX's `ragged_paged_attention` has, in pages alone."""
PAGES_HOLD = (None, *PAGED_CACHES, *WHOLE_CACHES)
"""What pages may hold, none for keys and values in the dtype of the operands."""
_LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
_BY_DTYPE = {dtype: _LARGEST[kind] for kind, dtype in STORED.items()}


def find_largest(dtype: np.dtype) -> float | None:
    """The largest stored number of a dtype, none if it is not one of `STORED`."""
    return _BY_DTYPE.get(np.dtype(dtype))


def get_stored_dtype(cache: str) -> np.dtype:
    """The dtype of what `cache` stores."""
    return STORED[cache.removeprefix("kv").split("-")[0]]


def quantize(x: np.ndarray, cache: str) -> tuple[np.ndarray, np.ndarray]:
    """What `cache` stores of `x [B, S, K, D]`, and its scales, f32 `[B, S, K]`, `[1, 1, K]` or `[]`."""
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
    """What the cache means, in float64."""
    return stored.astype(np.float64) * scales.astype(np.float64)[..., None]


def compute_half_steps(stored: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """How far what was stored may have been from what the cache means, in float64.

    Half a scale for integers; for fp8 half the spacing at the stored number, which may be the upper end of its binade.
    """
    scale = scales.astype(np.float64)[..., None]
    if stored.dtype != STORED["fp8"]:
        return np.broadcast_to(scale / 2, stored.shape)
    size = np.abs(stored.astype(np.float64))
    exponent = np.floor(np.log2(np.maximum(size, 2.0**-6)))  # subnormal below 2**-6
    return scale * 2.0 ** (exponent - 4)
