"""Quantise keys and values to the small numbers that a cache stores, with scales, and dequantise them."""

from __future__ import annotations

from typing import Any

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
GIVEN_CACHES = ("kvint8-given", "kvfp8-given")
"""Quantised caches that a call writes with one scale for all keys and one for all values, which it is given."""
UNIT_CACHES = ("kvint8-unit", "kvfp8-unit")
"""The same with scales of 1."""
COMPUTED_CACHES = ("kvint8-computed", "kvfp8-computed")
"""Quantised caches that a call writes with scales for each token and head, which it computes and writes too."""
WRITTEN_CACHES = (*GIVEN_CACHES, *UNIT_CACHES, *COMPUTED_CACHES)
"""Quantised caches of calls that write them. `build_raw_tokens` has the numbers that such a call is given."""
PAGES_HOLD = (None, *PAGED_CACHES, *WHOLE_CACHES, *WRITTEN_CACHES)
"""The quantised caches that pages may hold; None stands for keys and values in the dtype of the operands."""
QUERIES = "/qfp8"
"""The end of the name of a cache for calls that also get queries in fp8 (`split_level`)."""
_Q_SIGNIFICAND = 11 / 16
_LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
_BY_DTYPE = {dtype: _LARGEST[kind] for kind, dtype in STORED.items()}
_UNIT_ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
SCALE_ERROR = 4 * 2.0**-24
"""The largest error of a computed scale, relative to the exact one.

The largest magnitude of a token is exact. Multiplying by a reciprocal takes two roundings. Dividing takes one, or an
error of two units in the last place on some accelerators.
"""
# The roundings of `x / scale` in the dtype of x: the scale is cast, its reciprocal is rounded, and so is the product.
_QUOTIENT_ROUNDINGS = 3
_COMPUTED_ERROR = SCALE_ERROR + _QUOTIENT_ROUNDINGS * 2.0**-24  # the same in f32 for scales that are computed
_ZERO_TOKENS = 13  # one in so many tokens of a head is zero
_TINY_TOKENS = 7  # one in so many is smaller by `_TINY`, which shows the bounds that kernels put on scales; not in f16
_TINY = 2.0**-30
_SHARE_OF_ROOM = 0.9  # how much of the room between a stored number and a tie is used
_BEYOND = (1.1, 1.9)  # what is too large for the stored dtype is so many times the largest number


def find_largest(dtype: np.dtype) -> float | None:
    """Return the largest stored number of a dtype, or None if it is not one of `STORED`."""
    return _BY_DTYPE.get(np.dtype(dtype))


def get_stored_dtype(cache: str) -> np.dtype:
    """Return the dtype that `cache` stores."""
    return STORED[_split(cache)[0]]


def has_whole_scales(cache: str | None) -> bool:
    """Return whether `cache` has one scale for all keys and one for all values."""
    return cache in (*WHOLE_CACHES, *GIVEN_CACHES, *UNIT_CACHES)


def list_cache_features(cache: str) -> tuple[str, ...]:
    """List the features that a call needs for `cache`."""
    kind, by = _split(cache)
    if cache in COMPUTED_CACHES:
        return f"kv_{kind}", "kv_token_scales", "kv_writes_computed"
    if cache in WRITTEN_CACHES:
        return f"kv_{kind}", "kv_tensor_scales", "kv_writes_scaled"
    return f"kv_{kind}", f"kv_{by}_scales"


def split_level(level: str | None) -> dict[str, Any]:
    """Return the fields of a case for what a call takes: a quantised cache or None, and with `QUERIES` fp8 queries."""
    cache = None if level is None else level.removesuffix(QUERIES)
    return {"kv_cache": cache, "q_fp8": cache != level}


def quantize_queries(q: np.ndarray) -> tuple[np.ndarray, float]:
    """Round queries to numbers of float8_e4m3fn times one scale; returns them in the dtype of `q`, and the scale.

    The scale has four significant bits, as the numbers do. So their products are exact in every dtype, except for the
    smallest ones in f16, which become zero. The scale is no power of two.
    """
    exact = q.astype(np.float64)
    peak = np.abs(exact).max()
    scale = _Q_SIGNIFICAND * 2.0 ** np.ceil(np.log2((peak or 1.0) / (_LARGEST["fp8"] * _Q_SIGNIFICAND)))
    return _keep_exact((exact / scale).astype(STORED["fp8"]).astype(np.float64) * scale, q.dtype), float(scale)


def rescale_queries(q: np.ndarray, scale: float, other: float) -> np.ndarray:
    """Return queries of one scale as queries of another, for the same fp8 numbers."""
    return _keep_exact(q.astype(np.float64) * (other / scale), q.dtype)


def _keep_exact(q: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Cast to a dtype; what is not exact there becomes zero."""
    rounded: np.ndarray = q.astype(dtype)
    return np.where(rounded.astype(np.float64) == q, rounded, np.zeros_like(rounded))


def _split(cache: str) -> tuple[str, str]:
    """Return what `cache` stores, and what a scale belongs to."""
    kind, by = cache.removeprefix("kv").split("-")
    return kind, by


def quantize(x: np.ndarray, cache: str) -> tuple[np.ndarray, np.ndarray]:
    """Quantise `x [B, S, K, D]` as `cache` names it.

    Returns:
      the stored numbers `[B, S, K, D]`, and f32 scales: `[B, S, K]` by token, `[1, 1, K]` by head, or `[]` by tensor.
    """
    kind, by = _split(cache)
    if cache in (*GIVEN_CACHES, *UNIT_CACHES):
        return _quantize_written(x, kind, is_unit=cache in UNIT_CACHES)
    exact = x.astype(np.float64)
    if cache in COMPUTED_CACHES:  # some tokens are tiny in a head, and some are zero
        if x.dtype != np.float16:
            exact[np.arange(exact[..., 0].size).reshape(exact.shape[:3]) % _TINY_TOKENS == 0] *= _TINY
        exact[np.arange(exact[..., 0].size).reshape(exact.shape[:3]) % _ZERO_TOKENS == _ZERO_TOKENS - 2] = 0.0
    axes = {"token": (3,), "computed": (3,), "head": (0, 1, 3), "tensor": (0, 1, 2, 3)}[by]
    peak = np.abs(exact).max(axis=axes, keepdims=True)
    scales = np.where(peak == 0, 1.0, peak / _LARGEST[kind]).astype(np.float32)
    scaled = exact / scales
    if kind != "fp8":
        scaled = np.rint(scaled)
    stored = np.clip(scaled, -_LARGEST[kind], _LARGEST[kind]).astype(STORED[kind])
    return stored, scales.reshape(()) if by == "tensor" else scales[..., 0]


def _quantize_written(x: np.ndarray, kind: str, *, is_unit: bool) -> tuple[np.ndarray, np.ndarray]:
    """Quantise `x [B, S, K, D]` to numbers that rounded arithmetic in the dtype of x finds too, and one scale.

    In every second token, the largest coordinate is stored as the largest number, for a value that is too large.
    """
    largest, dtype = _LARGEST[kind], STORED[kind]
    every = np.arange(-largest, largest + 1) if kind != "fp8" else np.array([1.0])
    reach = largest if kind == "fp8" else every[find_room(every.astype(dtype), x.dtype) > 0].max()
    exact = x.astype(np.float64)
    peak = np.abs(exact).max()
    scale = np.float32(1.0 if peak == 0 else peak / reach)
    scaled = np.clip(exact / scale, -reach, reach)
    if kind != "fp8":
        scaled = np.rint(scaled)
    tokens = np.arange(scaled[..., 0].size).reshape(*scaled.shape[:3], 1) % 2 == 1
    top = np.arange(scaled.shape[3]) == np.abs(scaled).argmax(axis=3)[..., None]
    stored = np.where(tokens & top, np.copysign(largest, scaled), scaled).astype(dtype)
    return stored, np.array(1.0 if is_unit else scale, np.float32)


def find_room(stored: np.ndarray, dtype: np.dtype, *, computed: bool = False) -> np.ndarray:
    """Find how far from a stored number a value may lie so that every right rounding finds this number, in float64.

    The value is in `dtype`, and so may be each step that divides it by its scale. If scales are `computed`, they and
    the steps are in f32. The unit is that of stored numbers. Where the room is not positive, rounded arithmetic may
    find a neighbour of the number.
    """
    own = _UNIT_ROUNDOFF[np.dtype(dtype).name]
    half = compute_half_steps(stored, np.ones((), np.float32))
    size = np.abs(stored.astype(np.float64))
    if stored.dtype == STORED["fp8"]:  # below a power of two, fp8 numbers lie twice as close
        half = np.where(np.frexp(size)[0] == 0.5, half / 2, half)
    return half - (own + (_COMPUTED_ERROR if computed else _QUOTIENT_ROUNDINGS * own)) * size


def build_raw_tokens(stored: np.ndarray, scales: np.ndarray, dtype: np.dtype, draws: np.ndarray) -> np.ndarray:
    """Build values in `dtype` which every right way to divide by scales, clip and round turns into `stored`.

    They lie anywhere in the room that `find_room` finds. With one scale for all, some that are stored as the largest
    number are larger. With a scale for each token, such a value is the peak of its token, from which a call computes
    the scale. Tokens that are stored as zeros are zero.

    Args:
      stored: the stored numbers, `[..., D]`.
      scales: one scale for all, `[]`, or one for each token, `[...]`.
      draws: numbers from 0 to 1 of the shape of `stored`, which decide where in its room a value lies.
    """
    computed = scales.ndim > 0
    exact, room = stored.astype(np.float64), find_room(stored, dtype, computed=computed)
    is_largest = np.abs(exact) == _BY_DTYPE[stored.dtype]
    offset = _SHARE_OF_ROOM * np.maximum(room, 0) * (2 * draws - 1)
    offset = np.where(exact == 0, np.copysign(offset, exact), offset)  # zero has a sign in fp8
    if computed:
        offset = np.where(is_largest | (exact == 0).all(axis=-1, keepdims=True), 0, offset)
        scaled, wide = exact + offset, scales.astype(np.float64)[..., None]
    else:
        factor = _BEYOND[0] + (_BEYOND[1] - _BEYOND[0]) * draws
        is_beyond = is_largest & ((draws > 0.5) | (room <= 0))
        scaled, wide = np.where(is_beyond, exact * factor, exact + offset), scales.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):  # poison may be among the numbers and the scales
        return (scaled * wide).astype(dtype)


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
