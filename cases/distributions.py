"""Distributions that shape queries and keys: logits at certain levels, tails, and keys that win most rows."""

from __future__ import annotations

import math

import numpy as np

from cases.case import Case
from cases.counter_rng import draw_integers

# Logits at which kernels clip, mask or start: where exp overflows and underflows in f32 and f16, what stands for minus
# infinity in some (-1e4), and zero.
_LEVELS = (0.0, 81.0, -81.0, 90.0, -90.0, 105.0, -105.0, 130.0, -130.0, 1100.0, -1100.0, 1.1e4, -1.1e4)
_LEVEL_KEY = 16.0
_JUMP = 200.0


def lift_logits(case: Case, q: np.ndarray, k: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Every query has its logits around one of `_LEVELS`, the next head around the next one, in a group too.

    Some queries are zero, and some keys the same as others.

    As in `huge` (`cases.operand_values`), one coordinate lifts all logits of a query without touching their differences. For
    one query in four another coordinate lifts the second half of the keys, by more than exp can bear.
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


def make_heavy_tailed(case: Case, name: str, x: np.ndarray) -> np.ndarray:
    """A normal times a power of two: 1 half the time, then 2, 4, 8 ever more rarely, as real activations have."""
    draws = draw_integers(case.seed, f"{name}-tail", x.shape, 64)
    exponent = (draws >= 32).astype(int) + (draws >= 52) + (draws >= 62)
    return x * 2.0 ** (exponent - 1)


def add_dominant_keys(case: Case, q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    """A few keys that win most rows, the strongest last, so that a running maximum keeps rising."""
    direction = draw_integers(case.seed, "direction", (case.head_dim,), 2) * 2.0 - 1.0
    q += direction
    for rank, position in enumerate((0, case.kv_length // 2, case.kv_length - 1)):
        k[:, position] += direction * ((5.0 + rank) / (scale * case.head_dim))
    return k
