"""Shape drawn queries and keys for some value distributions: logits at chosen levels, heavy tails, dominant keys.

`cases.operand_values` draws the values and calls these functions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from cases.counter_rng import draw_integers

if TYPE_CHECKING:  # cases have operands, whose modules import this one
    from cases.case import Case

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

MOVED = ("low", "apart", "levels", "huge")
"""The distributions whose logits are far from zero, or far apart: any soft cap is flat there."""


def lift_logits(case: Case, q: np.ndarray, k: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Lift the logits of every query to one of `_LEVELS`; heads of a group get different levels too.

    Some queries are zero, and some keys are copies of others. As in the distribution `huge`, one coordinate lifts all
    logits of a query without changing their differences. For one query in four, a second coordinate lifts the logits of
    the second half of the keys so far that `exp` of the difference overflows.
    """
    heads = np.arange(case.num_q_heads)
    level = np.take(_LEVELS, np.arange(case.q_length)[:, None] + heads, mode="wrap")  # [T, N]
    mantissa, exponent = np.frexp(level / (scale * _LEVEL_KEY))
    q[..., 0], k[..., 0] = np.ldexp(np.round(mantissa * 256), exponent - 8), _LEVEL_KEY
    q[..., 1], k[..., 1] = 0.0, 0.0
    q[:, 1::4, :, 1] = 2.0 ** math.ceil(math.log2(_JUMP / (scale * _LEVEL_KEY)))
    k[:, case.kv_length // 2 :, :, 1] = _LEVEL_KEY
    q[:, :: len(_LEVELS)] = 0.0
    k[:, 4::5] = k[:, 3::5][:, : k[:, 4::5].shape[1]]
    return q, k


def compute_low_coordinates(num_q_heads: int, scale: float) -> tuple[float, np.ndarray]:
    """Return first coordinates of k, and of q by head `[N]`, that lower all logits of a head to about one level.

    Both have at most 8 significant bits, so that every dtype has them exactly.
    """
    level = np.resize(_LOW_LOGITS, num_q_heads)
    mantissa, exponent = np.frexp(level / (scale * _LEVEL_KEY))
    return _LEVEL_KEY, np.ldexp(np.round(mantissa * 256), exponent - 8)


def lower_logits(case: Case, q: np.ndarray, k: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Lower all logits of each query head far below zero; their differences stay."""
    k[..., 0], q[..., 0] = compute_low_coordinates(case.num_q_heads, scale)
    return q, k


def move_logits_apart(case: Case, q: np.ndarray, k: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Raise or lower the logits of every second stretch of keys by one of `_JUMPS`, which queries take in turn.

    The running maximum of a kernel that visits keys in order jumps several times, or falls far behind.
    """
    turns = np.arange(case.q_length)[:, None] + np.arange(case.num_q_heads)
    jump = np.take(_JUMPS, turns, mode="wrap")  # [T, N]
    mantissa, exponent = np.frexp(jump / (scale * _LEVEL_KEY))
    stretch = np.arange(case.kv_length) * _STRETCHES // case.kv_length
    q[..., 0] = np.ldexp(np.round(mantissa * 256), exponent - 8)
    k[..., 0] = np.where(stretch % 2, _LEVEL_KEY, 0.0)[:, None]
    return q, k


def make_heavy_tailed(case: Case, name: str, x: np.ndarray) -> np.ndarray:
    """Multiply each value by a power of two: 1 half the time, then ever more rarely 2, 4 and 8.

    Activations of trained models have such tails.
    """
    draws = draw_integers(case.seed, f"{name}-tail", x.shape, 64)
    exponent = (draws >= 32).astype(int) + (draws >= 52) + (draws >= 62)
    return x * 2.0 ** (exponent - 1)


def add_dominant_keys(case: Case, q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    """Make three keys dominate most rows: they get most of the softmax's weight.

    The strongest key is last, so that a running maximum keeps rising.
    """
    direction = draw_integers(case.seed, "direction", (case.head_dim,), 2) * 2.0 - 1.0
    q += direction
    for rank, position in enumerate((0, case.kv_length // 2, case.kv_length - 1)):
        k[:, position] += direction * ((5.0 + rank) / (scale * case.head_dim))
    return k


def compute_huge_coordinates(scale: float) -> tuple[float, float]:
    """Return first coordinates of k and q that lift logits just above `_HUGE_LOGIT`, in bf16's 8 significant bits."""
    k = 2.0**11
    mantissa, exponent = math.frexp(_HUGE_LOGIT / (scale * k))
    return k, math.ldexp(math.ceil(mantissa * 256), exponent - 8)
