"""Shape drawn operands for some value distributions: logits at chosen levels, heavy tails, dominant keys, signs.

`cases.operand_values` draws the values and calls these functions.
"""

from __future__ import annotations

import math

import numpy as np

from cases.case_fields import CaseFields
from cases.counter_rng import draw_integers

# Logits at which kernels clip, mask or start a running maximum: where exp overflows and underflows in f32 and f16, what
# some kernels use for minus infinity (-1e4), and zero.
_LEVELS = (0.0, 81.0, -81.0, 90.0, -90.0, 105.0, -105.0, 130.0, -130.0, 1100.0, -1100.0, 1.1e4, -1.1e4)
_LEVEL_KEY = 16.0
_JUMP = 200.0
# Beyond the largest float16, 65504.
_HUGE_LOGIT = 6.6e4
# About the logits of successive query heads in `low`. Weights underflow if a running maximum starts at 0, or at -1e4.
_LOW_LOGITS = (-120.0, -1.1e4, -400.0)
# By how much logits rise or fall from one stretch of keys to the next in `apart`, for successive queries and heads:
# beyond the range of exp in f32, beyond what f32 adds to 1 many times, and just beyond what it adds to 1.
_JUMPS = (200.0, -95.0, 18.0, -200.0, 95.0, -18.0)
_STRETCHES = 5
# How far `rising` logits rise over all keys, at least and at most. exp(11) is the largest power of e in float16, and
# exp(88) in float32.
_LEAST_RISE, _RISE_RANGE = 4.0, 32.0
_RISE_STEPS = 64
# `aligned` values in float16 are so large that the sum of some hundred weighted values overflows. Their cotangents are
# as small as the values are large, so that dp fits. `aligned` cotangents in bfloat16 are so large that dp overflows
# float16.
_ALIGNED_FACTOR = 2.0**12
_OPPOSED_CHUNKS = 8
_OPPOSED_SIZE = 4.0
# By how much queries shrink in the coordinates in which latents hold values.
_TIED_SHARE = 2.0**-6

MOVED = ("low", "apart", "levels", "huge")
"""The distributions whose logits are far from zero, or far apart: any soft cap is flat there."""


def _compute_query_coordinates(logits: np.ndarray, scale: float) -> np.ndarray:
    """Return coordinates of q that add about `logits` where k has `_LEVEL_KEY`, in bf16's 8 significant bits."""
    mantissa, exponent = np.frexp(logits / (scale * _LEVEL_KEY))
    rounded: np.ndarray = np.ldexp(np.round(mantissa * 256), exponent - 8)
    return rounded


def lift_logits(case: CaseFields, q: np.ndarray, k: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Lift the logits of every query to one of `_LEVELS`; heads of a group get different levels too.

    Some queries are zero, and some keys are copies of others. As in the distribution `huge`, one coordinate lifts all
    logits of a query without changing their differences. For one query in four, a second coordinate lifts the logits of
    the second half of the keys so far that `exp` of the difference overflows.
    """
    heads = np.arange(case.num_q_heads)
    level = np.take(_LEVELS, np.arange(case.q_length)[:, None] + heads, mode="wrap")  # [T, N]
    q[..., 0], k[..., 0] = _compute_query_coordinates(level, scale), _LEVEL_KEY
    q[..., 1], k[..., 1] = 0.0, 0.0
    q[:, 1::4, :, 1] = 2.0 ** math.ceil(math.log2(_JUMP / (scale * _LEVEL_KEY)))
    k[:, case.kv_length // 2 :, :, 1] = _LEVEL_KEY
    q[:, :: len(_LEVELS)] = 0.0
    k[:, 4::5] = k[:, 3::5][:, : k[:, 4::5].shape[1]]
    return q, k


def compute_low_coordinates(num_q_heads: int, scale: float) -> tuple[float, np.ndarray]:
    """Return first coordinates of k, and of q by head `[N]`, that lower all logits of a head to about one level."""
    return _LEVEL_KEY, _compute_query_coordinates(np.resize(_LOW_LOGITS, num_q_heads), scale)


def lower_logits(case: CaseFields, q: np.ndarray, k: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Lower all logits of each query head far below zero; their differences stay."""
    k[..., 0], q[..., 0] = compute_low_coordinates(case.num_q_heads, scale)
    return q, k


def move_logits_apart(case: CaseFields, q: np.ndarray, k: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Shift the logits of every second stretch of keys by one of `_JUMPS`, so that a running maximum jumps or lags."""
    turns = np.arange(case.q_length)[:, None] + np.arange(case.num_q_heads)
    jump = np.take(_JUMPS, turns, mode="wrap")  # [T, N]
    stretch = np.arange(case.kv_length) * _STRETCHES // case.kv_length
    q[..., 0] = _compute_query_coordinates(jump, scale)
    k[..., 0] = np.where(stretch % 2, _LEVEL_KEY, 0.0)[:, None]
    return q, k


def make_heavy_tailed(case: CaseFields, name: str, x: np.ndarray) -> np.ndarray:
    """Multiply half the values by 1 and ever fewer by 2, 4 and 8, since trained models' activations have such tails."""
    draws = draw_integers(case.seed, f"{name}-tail", x.shape, 64)
    exponent = (draws >= 32).astype(int) + (draws >= 52) + (draws >= 62)
    return x * 2.0 ** (exponent - 1)


def add_dominant_keys(case: CaseFields, q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    """Give three keys most of the weight in most rows, the strongest last, so that a running maximum keeps rising."""
    direction = _draw_direction(case, "direction", case.head_dim)
    q += direction
    for rank, position in enumerate((0, case.kv_length // 2, case.kv_length - 1)):
        k[:, position] += direction * ((5.0 + rank) / (scale * case.head_dim))
    return k


def compute_huge_coordinates(scale: float) -> tuple[float, float]:
    """Return first coordinates of k and q that lift logits just above `_HUGE_LOGIT`, in bf16's 8 significant bits."""
    k = 2.0**11
    mantissa, exponent = math.frexp(_HUGE_LOGIT / (scale * k))
    return k, math.ldexp(math.ceil(mantissa * 256), exponent - 8)


def align_values(case: CaseFields, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Make all values positive, and shift all keys along one direction.

    Partial sums of `out` and of `D` then grow steadily, so rounding them is as large as rounding the whole. An error of
    `D` is one error for all keys of a row, which shows in `dq` where the keys have a mean.
    """
    size = _ALIGNED_FACTOR if case.dtype == "f16" else 1.0
    return k + _draw_direction(case, "k-direction", case.head_dim), np.abs(v) * size


def oppose_values(
    case: CaseFields, q: np.ndarray, k: np.ndarray, v: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make partial sums far larger than whole sums: over keys in `out` and `dq`, over queries in `dk`.

    Keys lie in `_OPPOSED_CHUNKS` chunks. The values of a coordinate have one sign in a chunk, and both signs have as
    many chunks. Coordinates have different patterns of signs, so that their errors are independent. All keys are
    shifted along one direction, and so are the queries, whose second half is shifted the other way.
    """
    chunk = np.arange(case.kv_length) * _OPPOSED_CHUNKS // case.kv_length
    pattern = 1 + np.arange(case.v_head_dim) % (_OPPOSED_CHUNKS - 1)
    bits = chunk[:, None] & pattern  # rows of a Hadamard matrix without the first, whose signs are all equal
    signs = 1.0 - 2.0 * ((bits ^ (bits >> 1) ^ (bits >> 2)) & 1)  # [S, V]
    half = np.where(2 * np.arange(case.q_length) < case.q_length, 1.0, -1.0)
    q = q + half[:, None, None] * _draw_direction(case, "q-direction", case.head_dim)
    k = k + _draw_direction(case, "k-direction", case.head_dim)
    return q, k, v + _OPPOSED_SIZE * signs[:, None]


def write_values_into_keys(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Make values the first coordinates of the keys, as latents hold them, and make these coordinates of queries small.

    So the pattern of the values hardly changes the logits.
    """
    depth = v.shape[-1]
    q[..., :depth] *= _TIED_SHARE
    k[..., :depth] = v
    return q, k


def raise_logits(case: CaseFields, q: np.ndarray, k: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Make the logits of each row rise steadily from the first key to the last, by another amount in each row.

    They are near 0 in the middle. A kernel that rescales its sums only where the maximum rises by more than a threshold
    meets every rise below it.
    """
    places = np.arange(case.q_length)[:, None] * 0.618 + np.arange(case.num_q_heads) * 0.382  # low discrepancy
    rise = _LEAST_RISE * _RISE_RANGE ** (places % 1)  # [T, N]
    step = np.arange(case.kv_length) * _RISE_STEPS // case.kv_length - _RISE_STEPS // 2  # a quarter is exact in bf16
    k[..., 0] = (step / 4.0)[:, None]
    q[..., 0] = rise / (scale * _RISE_STEPS / 4.0)
    return q, k


def make_cotangent_positive(case: CaseFields, do: np.ndarray) -> np.ndarray:
    """Make the cotangents of `out` positive, and spread the magnitudes of rows over one binade, evenly in logarithms.

    The values `dp` of a row are then nearly equal. Across rows, their mantissas are distributed as the expected
    variance of a rounding assumes (docs/numerics.md, section 8).
    """
    rows = draw_integers(case.seed, "do-rows", do.shape[:3], 256)
    size = 1.0
    if case.distribution == "aligned":
        size = {"f16": 1 / _ALIGNED_FACTOR, "bf16": _ALIGNED_FACTOR}.get(case.dtype, 1.0)
    return np.abs(do) * np.exp2(rows / 256)[..., None] * size


def _draw_direction(case: CaseFields, stream: str, depth: int) -> np.ndarray:
    """Draw a vector of ones and minus ones."""
    return draw_integers(case.seed, stream, (depth,), 2) * 2.0 - 1.0
