"""Which pairs of blocks the kernels visit over packed sequences: lists of steps made at run time from the borders.

Each query sees the keys `low` to `high - 1` of the pack (`impls.packed_sequences`). So whether a pair of blocks holds a pair of
query and key, and whether it holds no other, follows from these two numbers of its queries. The lists are as long as
they can get for the lengths, and the grid is as long as there are steps: the work follows the sequences.

Lists lie in scalar memory, twelve bytes a step. Without a window there may be one for every pair of blocks, since one
sequence may have the whole pack.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from impls.splash_tpu.block_sizes import Blocks, round_up
from impls.splash_tpu.splash_schedule import COMPUTE, FIRST, LAST, MASKED, PART, Order, StepKinds, Steps


def list_step_kinds(blocks: Blocks) -> StepKinds:
    """Which kinds of steps there may be: of every kind that takes no stored mask, for nothing is known before."""
    parts = blocks.parts != (blocks.q, blocks.kv)
    return StepKinds(full=True, masked=True, empty=True, stored=False, parts=parts, dead=True)


def build_packed_steps(
    low: jax.Array, high: jax.Array, kv_length: int, blocks: Blocks, order: Order, *, seen: int | None = None
) -> Steps:
    """The steps of a call: every pair of blocks that holds a pair, and one for a block of results that has none.

    Args:
      low: int32 `[T]`, the first key that each query sees; grows with the queries that see any.
      high: int32 `[T]`, one past the last, likewise; both 0 for a query that sees none.
      kv_length: S.
      blocks: block sizes.
      order: `"q"` if results are blocks of queries, `"kv"` if they are blocks of keys.
      seen: the most keys that a query sees, if that is known before.
    """
    left, full = _classify_pairs(low, high, kv_length, blocks)
    holds = left.any(axis=-1)
    num_q, num_kv = holds.shape
    most = _bound_steps(num_q, num_kv, blocks, seen)
    if order == "kv":
        left, full, holds = left.swapaxes(0, 1), full.T, holds.T
    visited = holds.at[:, 0].set(holds[:, 0] | ~holds.any(axis=1))
    total = visited.sum(dtype=jnp.int32)
    (place,) = jnp.nonzero(visited.reshape(-1), size=most, fill_value=visited.size - 1)
    row, column = (x.astype(jnp.int32) for x in jnp.divmod(place, visited.shape[1]))
    computes, masked = holds[row, column], holds[row, column] & ~full[row, column]
    number = jnp.arange(most, dtype=jnp.int32)
    before, after = jnp.roll(row, 1), jnp.roll(row, -1)
    flags = FIRST * ((number == 0) | (row != before)) + LAST * ((number == total - 1) | (row != after))
    flags = flags + COMPUTE * computes + MASKED * masked
    if list_step_kinds(blocks).parts:
        flags = flags + masked * (left[row, column] @ (PART << jnp.arange(left.shape[2], dtype=jnp.int32)))
    # What a step that computes nothing points to is what is there already: nothing is fetched for it.
    column = column[lax.cummax(jnp.where(computes, number, 0))]
    q, kv = (row, column) if order == "q" else (column, row)
    lists = (x.astype(jnp.int32)[None, None, None] for x in (q, kv, flags))
    q, kv, flags = lists
    return Steps(q=q, kv=kv, head=None, flags=flags, place=None, stored=None, total=total)


def _classify_pairs(low: jax.Array, high: jax.Array, kv_length: int, blocks: Blocks) -> tuple[jax.Array, jax.Array]:
    """Booleans `[q blocks, kv blocks, parts]`, parts that hold a pair, and `[q blocks, kv blocks]`, with no other pair.

    A comparison for each query and each part of the keys: XLA keeps none of them.
    """
    (q_part, kv_part), padded = blocks.parts, round_up(len(low), blocks.q)
    low, high = (jnp.pad(x, (0, padded - len(x))).reshape(-1, q_part, 1) for x in (low, high))
    start = jnp.arange(0, round_up(kv_length, blocks.kv), kv_part, dtype=jnp.int32)
    end = start + kv_part
    some = ((low < end) & (high > start)).any(axis=1)
    every = ((low <= start) & (high >= end)).all(axis=1)

    def by_block(x: jax.Array) -> jax.Array:
        q_parts, kv_parts = blocks.q // q_part, blocks.kv // kv_part
        x = x.reshape(len(x) // q_parts, q_parts, -1, kv_parts).swapaxes(1, 2)
        return x.reshape(*x.shape[:2], -1)

    return by_block(some), by_block(every).all(axis=-1)


def _bound_steps(num_q: int, num_kv: int, blocks: Blocks, seen: int | None) -> int:
    """How many steps there can be for so many blocks of queries and of keys.

    Ranges only move ahead, so a block of keys is seen by queries that follow one another. It counts once, and once more
    for every end of a block of queries among these; over such an end reach no more than the keys of one query.
    """
    if seen is None:
        return num_q * num_kv
    touched = -(-(seen - 1) // blocks.kv) + 1
    return min(num_q * num_kv, num_kv + (num_q - 1) * touched + max(num_q, num_kv))
