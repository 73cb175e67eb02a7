"""Quantise keys and values to the small numbers that a cache stores, with scales, and dequantise them."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

STORED: dict[str, np.dtype] = {
    "int8": np.dtype(np.int8),
    "int4": np.dtype(ml_dtypes.int4),
    "fp8": np.dtype(ml_dtypes.float8_e4m3fn),
    "mxfp8": np.dtype(ml_dtypes.float8_e4m3fn),
    "nvfp4": np.dtype(ml_dtypes.float4_e2m1fn),
    "uint8": np.dtype(np.uint8),
}
GRANULARITIES = ("token", "head")
KV_CACHES = tuple(f"kv{kind}-{by}" for kind in ("int8", "int4", "fp8") for by in GRANULARITIES)
"""Quantised caches as case ids name them. `kvint8-token` has int8 numbers and a scale for each token and head."""
PAGED_CACHES = ("kvint8-token", "kvfp8-token")
"""Quantised caches in pages with a scale for each token and head, as JAX's `paged_attention` takes them."""
WHOLE_CACHES = ("kvint8-tensor", "kvfp8-tensor")
"""Quantised caches in pages with one scale for all keys and one for all values: JAX's `ragged_paged_attention`."""
SEQUENCE_CACHES = ("kvint8-sequence", "kvfp8-sequence")
"""Quantised caches in pages with a scale for each sequence and head, as FlashAttention 3 takes them (`k_descale`)."""
GIVEN_CACHES = ("kvint8-given", "kvfp8-given")
"""Quantised caches that a call writes with one scale for all keys and one for all values, which it is given."""
UNIT_CACHES = ("kvint8-unit", "kvfp8-unit")
"""The same with scales of 1."""
COMPUTED_CACHES = ("kvint8-computed", "kvfp8-computed")
"""Quantised caches that a call writes with scales for each token and head, which it computes and writes too."""
WRITTEN_CACHES = (*GIVEN_CACHES, *UNIT_CACHES, *COMPUTED_CACHES)
"""Quantised caches of calls that write them. `build_raw_tokens` has the numbers that such a call is given."""
BLOCK_CACHES = ("kvmxfp8-block", "kvnvfp4-block")
"""Quantised caches in pages with a scale for each block of a row (`BLOCK_SIZES`), as `jax.nn.scaled_matmul` has."""
BLOCK_SIZES = {"mxfp8": 32, "nvfp4": 16}
"""The number of coordinates of a block, by what is stored (OCP Microscaling Formats 1.0; NVIDIA's NVFP4)."""
SCALE_DTYPES = {"mxfp8": np.dtype(ml_dtypes.float8_e8m0fnu), "nvfp4": np.dtype(ml_dtypes.float8_e4m3fn)}
"""The dtype of scales of blocks, by what is stored."""
CHANNEL_CACHES = ("kvuint8-channel",)
"""Quantised caches with zero points: keys by channel in the tokens of a page, values by token (KIVI)."""
READ_CACHES = (*SEQUENCE_CACHES, *BLOCK_CACHES, *CHANNEL_CACHES)
"""Further quantised caches that only calls that read pages take."""
PAGES_HOLD = (None, *PAGED_CACHES, *WHOLE_CACHES, *WRITTEN_CACHES, *READ_CACHES)
"""The quantised caches that pages may hold; None stands for keys and values in the dtype of the operands."""
QUERIES = "/qfp8"
"""The end of the name of a cache for calls that also get queries in fp8 (`split_level`)."""
# Scales of queries have as many significant bits as leave their product with every fp8 number exact: 20 in f32,
# 8 in f16, 5 in bf16. So they are in between numbers of fp8, and in f32 also of bf16 and f16.
_Q_SIGNIFICANDS = {"float32": 0x88701 / 2**20, "float16": 135 / 256, "bfloat16": 17 / 32}
_LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0, "mxfp8": 448.0, "nvfp4": 6.0, "uint8": 255.0}
# The exponent of the smallest normal number, and the exponent of half a step relative to that of a number.
_HALF_STEPS = {STORED["fp8"]: (-6, -4), STORED["nvfp4"]: (0, -2)}
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
# How much of the room between a stored number and a tie is used, by the dtype of x. What is left exceeds products of
# roundings, which the room ignores, and is less than a rounding to bf16 moves a number of a wider dtype.
_SHARES_OF_ROOM = {"float32": 0.99, "float16": 0.99, "bfloat16": 0.9}
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
    if cache in BLOCK_CACHES:
        return (f"kv_{kind}",)
    if cache in CHANNEL_CACHES:
        return ("kv_channel_scales",)
    if cache in COMPUTED_CACHES:
        return f"kv_{kind}", "kv_token_scales", "kv_writes_computed"
    if cache in WRITTEN_CACHES:
        return f"kv_{kind}", "kv_tensor_scales", "kv_writes_scaled"
    return f"kv_{kind}", f"kv_{by}_scales"


def get_scale_dtype(cache: str) -> np.dtype:
    """Return the dtype of scales of `cache`."""
    return SCALE_DTYPES.get(_split(cache)[0], np.dtype(np.float32))


def get_block_size(cache: str | None) -> int:
    """Return the number of coordinates of a block of `cache`; 1 if it has no scales of blocks."""
    return 1 if cache is None else BLOCK_SIZES.get(_split(cache)[0], 1)


def has_whole_blocks(cache: str | None, *depths: int) -> bool:
    """Return whether rows of these depths consist of whole blocks, if `cache` has scales of blocks."""
    return all(depth % get_block_size(cache) == 0 for depth in depths)


def split_level(level: str | None) -> dict[str, Any]:
    """Return the fields of a case for what a call takes: a quantised cache or None, and with `QUERIES` fp8 queries."""
    cache = None if level is None else level.removesuffix(QUERIES)
    return {"kv_cache": cache, "q_fp8": cache != level}


def quantize_queries(q: np.ndarray) -> tuple[np.ndarray, float]:
    """Round queries to numbers of float8_e4m3fn times one scale; returns them in the dtype of `q`, and the scale.

    Products with the scale are exact (`_Q_SIGNIFICANDS`), except for the smallest ones in f16, which become zero. The
    scale is no number of fp8 times a power of two.
    """
    rounded, scale = _round_queries(q, (0, 1, 2, 3))
    return rounded, float(scale.item())


def quantize_queries_by_sequence(q: np.ndarray, num_kv_heads: int) -> tuple[np.ndarray, np.ndarray]:
    """Round queries `[B, T, N, H]` likewise, with scales `[B, K]`: one for each sequence and key/value head."""
    grouped = q.reshape(*q.shape[:2], num_kv_heads, -1, q.shape[3])
    rounded, scales = _round_queries(grouped, (1, 3, 4))
    return rounded.reshape(q.shape), scales[:, 0, :, 0, 0].astype(np.float32)


def _round_queries(q: np.ndarray, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Round queries to fp8 numbers times scales that are the same along `axes`; returns both, scales with all axes."""
    exact = q.astype(np.float64)
    peak = np.abs(exact).max(axis=axes, keepdims=True)
    significand = _Q_SIGNIFICANDS[q.dtype.name]
    scale = significand * 2.0 ** np.ceil(np.log2(np.where(peak == 0, 1, peak) / (_LARGEST["fp8"] * significand)))
    return _keep_exact((exact / scale).astype(STORED["fp8"]).astype(np.float64) * scale, q.dtype), scale


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
      the stored numbers `[B, S, K, D]`, and f32 scales: `[B, S, K]` by token, `[1, 1, K]` by head, `[B, K]` by
      sequence, or `[]` by tensor.
    """
    kind, by = _split(cache)
    if cache in (*GIVEN_CACHES, *UNIT_CACHES):
        return _quantize_written(x, kind, is_unit=cache in UNIT_CACHES)
    exact = x.astype(np.float64)
    if cache in COMPUTED_CACHES:  # some tokens are tiny in a head, and some are zero
        if x.dtype != np.float16:
            exact[np.arange(exact[..., 0].size).reshape(exact.shape[:3]) % _TINY_TOKENS == 0] *= _TINY
        exact[np.arange(exact[..., 0].size).reshape(exact.shape[:3]) % _ZERO_TOKENS == _ZERO_TOKENS - 2] = 0.0
    axes = {"token": (3,), "computed": (3,), "head": (0, 1, 3), "sequence": (1, 3), "tensor": (0, 1, 2, 3)}[by]
    peak = np.abs(exact).max(axis=axes, keepdims=True)
    scales = np.where(peak == 0, 1.0, peak / _LARGEST[kind]).astype(np.float32)
    scaled = exact / scales
    if kind != "fp8":
        scaled = np.rint(scaled)
    stored = np.clip(scaled, -_LARGEST[kind], _LARGEST[kind]).astype(STORED[kind])
    if by == "tensor":
        return stored, scales.reshape(())
    return stored, scales[:, 0, :, 0] if by == "sequence" else scales[..., 0]


@dataclasses.dataclass(frozen=True)
class QuantizedCache:
    """Stored keys and values, and what turns them into numbers again; the fields are those of a problem."""

    k: np.ndarray  # [B, S, K, H]
    v: np.ndarray  # [B, S, K, V]
    kv_scales: tuple[np.ndarray, np.ndarray]
    kv_global_scales: tuple[float, float] | None = None
    kv_zeros: tuple[np.ndarray, np.ndarray] | None = None


def quantize_cache(k: np.ndarray, v: np.ndarray, cache: str, page_size: int | None = None) -> QuantizedCache:
    """Quantise keys `[B, S, K, H]` and values `[B, S, K, V]` as `cache` names it.

    Scales are those of `quantize`. Scales of blocks are `[B, S, K, blocks]`, in a dtype of `SCALE_DTYPES`. Scales and
    zero points of channels are `[B, S, K, H]`, the same for the tokens of a page.
    """
    if cache in CHANNEL_CACHES:
        page, kind = np.arange(k.shape[1]) // (page_size or 1), _split(cache)[0]
        starts, exact = np.flatnonzero(np.diff(page, prepend=-1)), k.astype(np.float64)
        low, high = (find.reduceat(exact, starts, axis=1)[:, page] for find in (np.minimum, np.maximum))
        stored_k, k_scales, k_zeros = _quantize_range(exact, low, high, kind)
        exact = v.astype(np.float64)
        low, high = exact.min(axis=-1, keepdims=True), exact.max(axis=-1, keepdims=True)
        stored_v, v_scales, v_zeros = _quantize_range(exact, low, high, kind)
        scales, zeros = (k_scales, v_scales[..., 0]), (k_zeros, v_zeros[..., 0])
        return QuantizedCache(stored_k, stored_v, scales, kv_zeros=zeros)
    if cache in BLOCK_CACHES:
        (k, k_scales, k_global), (v, v_scales, v_global) = (_quantize_blocks(x, _split(cache)[0]) for x in (k, v))
        has_global = cache == "kvnvfp4-block"
        return QuantizedCache(k, v, (k_scales, v_scales), (k_global, v_global) if has_global else None)
    (k, k_scales), (v, v_scales) = (quantize(x, cache) for x in (k, v))
    return QuantizedCache(k, v, (k_scales, v_scales))


def _quantize_range(
    x: np.ndarray, low: np.ndarray, high: np.ndarray, kind: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Store `x` in `low` to `high` as whole numbers from 0 on; returns them, f32 scales and f32 zero points.

    The zero point is `low`, which is added to a stored number times its scale (KIVI, arXiv:2402.02750).
    """
    scales = np.where(high == low, 1.0, (high - low) / _LARGEST[kind]).astype(np.float32)
    zeros = low.astype(np.float32)
    stored = np.clip(np.rint((x - zeros) / scales), 0, _LARGEST[kind]).astype(STORED[kind])
    return stored, scales, zeros


def reduce_pages(tokens: np.ndarray, page_size: int) -> np.ndarray:
    """Return booleans `[B, S, K]` that are true where all tokens of a key's page are marked in `tokens`."""
    starts = np.arange(0, tokens.shape[1], page_size)
    found: np.ndarray = np.logical_and.reduceat(tokens, starts, axis=1)[:, np.arange(tokens.shape[1]) // page_size]
    return found


def _quantize_blocks(x: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray, float]:
    """Quantise `x [B, S, K, D]` in blocks; returns stored numbers, scales of blocks, and the scale over all.

    Some blocks are zero. A scale in float8_e8m0fnu is a power of two. It rounds up, so that no number is too large, and
    is up to eight times larger than that, so that neighbouring scales differ.
    """
    largest = _LARGEST[kind]
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], -1, BLOCK_SIZES[kind])
    number = np.arange(blocks[..., 0].size).reshape(blocks.shape[:-1])
    blocks = np.where((number % _ZERO_TOKENS == 2)[..., None], 0.0, blocks)
    peak = np.abs(blocks).max(axis=-1)
    factor, is_zero = 1.0, peak == 0
    if kind == "mxfp8":
        exponent = np.ceil(np.log2(np.where(is_zero, 1.0, peak) / largest)) + 3 * number % 4
        scales = 2.0 ** np.where(is_zero, -127, exponent)  # torch stores the smallest scale for a block of zeros
    else:
        factor = float(np.float32(peak.max() / (largest * _LARGEST["fp8"]))) or 1.0
        scales = np.where(is_zero, 1.0, peak / (largest * factor))
    scales = scales.astype(SCALE_DTYPES[kind])
    wide = scales.astype(np.float64) * factor
    scaled = np.clip(blocks / np.where(wide == 0, 1.0, wide)[..., None], -largest, largest)
    return scaled.astype(STORED[kind]).reshape(x.shape), scales, factor


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
    offset = _SHARES_OF_ROOM[np.dtype(dtype).name] * np.maximum(room, 0) * (2 * draws - 1)
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


def dequantize(
    stored: np.ndarray, scales: np.ndarray, factor: float = 1.0, zeros: np.ndarray | None = None
) -> np.ndarray:
    """Return the stored numbers `[B, S, K, D]` times their scales and a factor, plus zero points, in float64."""
    scaled: np.ndarray = stored.astype(np.float64) * (spread_scales(scales, stored.shape[-1]) * factor)
    return scaled if zeros is None else scaled + spread_scales(zeros, stored.shape[-1])


def spread_scales(scales: np.ndarray, depth: int) -> np.ndarray:
    """Return scales of `quantize_cache` in float64, with axes that broadcast with stored numbers `[B, S, K, depth]`."""
    wide = scales.astype(np.float64)
    if wide.ndim == 4:
        return np.repeat(wide, depth // wide.shape[-1], axis=-1)
    return wide[:, None, :, None] if wide.ndim == 2 else wide[..., None]


def compute_half_steps(stored: np.ndarray, scales: np.ndarray, factor: float = 1.0) -> np.ndarray:
    """Compute the largest rounding error of quantisation, in float64.

    It is half a scale for integers. For fp8 and fp4 it is the scale times half the spacing of such numbers just above
    the stored number.
    """
    scale = spread_scales(scales, stored.shape[-1]) * factor
    if stored.dtype not in _HALF_STEPS:
        return np.broadcast_to(scale / 2, stored.shape)
    smallest, below = _HALF_STEPS[stored.dtype]
    size = np.abs(stored.astype(np.float64))
    exponent = np.floor(np.log2(np.maximum(size, 2.0**smallest)))  # smaller numbers are subnormal
    return scale * 2.0 ** (exponent + below)
