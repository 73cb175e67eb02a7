"""Decide which attention weights dropout keeps, by a hash of the key and of the global indices b, n, i and j.

A mask depends on nothing else, so any kernel with any blocks computes the same mask, and a backward pass computes it
again. Query `(b, n, i)` has two random words r and s, and key `j` has two random words c and d, all of 32 bits:

    hash(b, n, i, j) = (r ^ c) * (s ^ d)  modulo 2^32

The pair is dropped if its hash, unsigned, is below `round(rate * 2^32)`. s is odd and d is even, so a multiplier is odd
and each hash is uniform. The words cost memory and time linear in the lengths. They come from threefry-2x32 (Salmon et
al. 2011, doi:10.1145/2063384.2063405), as do `jax.random`'s. Per pair, the hash takes three integer instructions.

Chips compare signed integers. The top bit of r is flipped, which adds 2^31 to every hash, since multipliers are odd. So
a comparison of signed words with a limit that is lower by 2^31 decides the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Bool, Int32, UInt32

from impls.varying_axes import find_varying_axes, mark_varying


class DropoutWords(NamedTuple):
    """Random words of queries or of keys, int32: one term and one factor of the hash."""

    term: Any  # r with its top bit flipped, or c
    factor: Any  # s, which is odd, or d, which is even


def validate_dropout(rate: Any, key: Any) -> tuple[float | None, UInt32[Array, " 2"] | None]:
    """Return rate and raw key of a call, both None if no weight is dropped.

    Raises:
      ValueError: `dropout_rate` is no number from 0 to below 1 known before tracing, or a key is missing or wrong.
    """
    if rate is None:
        return None, None
    if isinstance(rate, bool) or not isinstance(rate, int | float | np.integer | np.floating) or not 0 <= rate < 1:
        raise ValueError(
            f"dropout_rate must be a Python number from 0 to below 1 (None for no dropout), got {rate!r}: it must be "
            "known before tracing"
        )
    rate = float(rate)
    if count_dropped(rate) == 0:
        return None, None
    if key is None:
        raise ValueError(f"dropout_key must be given with dropout_rate {rate}: a key of jax.random")
    try:
        words = jnp.asarray(jax.random.key_data(key))
    except TypeError as error:
        raise ValueError(f"dropout_key must be a key of jax.random, got {type(key).__name__}") from error
    if words.shape != (2,) or words.dtype != jnp.uint32:
        raise ValueError(f"dropout_key must be a key of two uint32 words, got {words.dtype} of shape {words.shape}")
    return rate, words


def count_dropped(rate: float) -> int:
    """Count the hashes, of 2^32, whose pairs are dropped. The rate 0 and rates below 2^-33 drop nothing."""
    return round(rate * 2**32)


def compute_keep_factor(rate: float) -> float:
    """Compute by what kept weights are multiplied, `1 / (1 - rate)`."""
    return 1 / (1 - rate)


def draw_query_words(key: UInt32[Array, " 2"], batch: int, num_q_heads: int, q_length: int) -> DropoutWords:
    """Draw the words of queries, int32 `[B, N, T]` each."""
    b, n = np.arange(1, batch + 1, dtype=np.uint32)[:, None], np.arange(num_q_heads, dtype=np.uint32)
    of_heads = _encrypt(key[0], key[1], *np.broadcast_arrays(b, n))  # [B, N]
    zero, i = np.uint32(0), np.arange(q_length, dtype=np.uint32)
    term, factor = _encrypt(of_heads[0][..., None], of_heads[1][..., None], zero, i)
    return DropoutWords(_to_int32(term ^ jnp.uint32(1 << 31)), _to_int32(factor | jnp.uint32(1)))


def draw_key_words(key: UInt32[Array, " 2"], kv_length: int) -> DropoutWords:
    """Draw the words of keys, int32 `[S]` each; batch rows and heads share them."""
    zero, j = np.uint32(0), np.arange(kv_length, dtype=np.uint32)
    of_keys = _encrypt(key[0], key[1], zero, zero)  # the words of a head have a first counter of at least 1
    term, factor = _encrypt(*of_keys, zero, j)
    return DropoutWords(_to_int32(term), _to_int32(factor & jnp.uint32(2**32 - 2)))


def find_kept(rate: float, queries: DropoutWords, keys: DropoutWords) -> Bool[Array, "..."]:
    """Find the pairs that are kept, from words of queries and of keys that broadcast with each other."""
    last_dropped = np.int32(count_dropped(rate) - 1 - 2**31)
    kept: Bool[Array, "..."] = (queries.term ^ keys.term) * (queries.factor ^ keys.factor) > last_dropped
    return kept


def draw_kept(key: Any, rate: float, shape: tuple[int, int, int, int]) -> Bool[Array, "B N T S"]:
    """Draw the whole mask of a call, `shape` being `(B, N, T, S)`: True where a weight is kept."""
    valid_rate, words = validate_dropout(rate, key)
    if valid_rate is None or words is None:
        return jnp.ones(shape, bool)
    queries = draw_query_words(words, *shape[:3])
    return find_kept(valid_rate, DropoutWords(*(x[..., None] for x in queries)), draw_key_words(words, shape[3]))


def _encrypt(key_0: Any, key_1: Any, count_0: Any, count_1: Any) -> tuple[UInt32[Array, "..."], UInt32[Array, "..."]]:
    """Encrypt two words of counters by two words of a key, all of shapes that broadcast."""
    axes = find_varying_axes((key_0, key_1))
    shape = np.broadcast_shapes(*(np.shape(x) for x in (key_0, key_1, count_0, count_1)))
    given = (jnp.broadcast_to(jnp.asarray(x, jnp.uint32), shape) for x in (key_0, key_1, count_0, count_1))
    first, second = threefry2x32_p.bind(*mark_varying(tuple(given), axes))
    return first, second


def _to_int32(x: UInt32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    return lax.bitcast_convert_type(x, jnp.int32)
