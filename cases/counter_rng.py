"""Draw random numbers with the same bits on every platform and NumPy version.

Only the raw output of the Philox counter-based generator is used. NumPy guarantees its stream, but not those of
`Generator.normal` and the like. The words become values by operations that IEEE 754 rounds exactly: integer arithmetic,
addition, multiplication. `log`, `exp` and `cos` are avoided, since their last bit differs between libraries.

Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import math
import zlib

import numpy as np

_DRAWS = 8  # 16-bit uniforms that are added for one normal value


def _draw_raw(seed: int, stream: str, count: int) -> np.ndarray:
    """Draw `count` random 64-bit words; `stream` names one of the independent streams of the seed."""
    key = np.array([seed, zlib.crc32(stream.encode())], np.uint64)
    return np.random.Philox(key=key).random_raw(count)


def draw_words(seed: int, stream: str, count: int) -> np.ndarray:
    """Draw `count` random 32-bit words, uint32."""
    return _draw_raw(seed, stream, -(-count // 2)).astype("<u8").view("<u4").astype(np.uint32)[:count]


def draw_integers(seed: int, stream: str, shape: tuple[int, ...], high: int) -> np.ndarray:
    """Draw integers in `[0, high)`, int64; `high` must be small against 2**64, or the modulo is biased."""
    raw = _draw_raw(seed, stream, math.prod(shape))
    return (raw % np.uint64(high)).astype(np.int64).reshape(shape)


def draw_uniform(seed: int, stream: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draw uniform values in `[0, 1)`, multiples of 2**-53, float64."""
    return ((_draw_raw(seed, stream, math.prod(shape)) >> np.uint64(11)) * 2.0**-53).reshape(shape)


def draw_normal(seed: int, stream: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draw nearly normal values of mean 0 and variance 1, float64.

    Each is a centred sum of eight 16-bit uniforms (Irwin-Hall). The sum is an integer, so every value is exact. The
    tails end at 4.9 standard deviations.
    """
    words = _draw_raw(seed, stream, 2 * math.prod(shape)).astype("<u8").view("<u2")
    total = words.reshape((*shape, _DRAWS)).sum(axis=-1, dtype=np.int64)
    centred = total - _DRAWS * 65535 // 2
    return centred * (math.sqrt(12 / _DRAWS) / 65536)
