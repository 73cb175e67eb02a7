"""Lists of steps for packed sequences, computed at run time from the key range of each query.

Each query sees the keys `low` to `high - 1` (`impls.packed_sequences`). These two numbers of a block's queries decide
whether a pair of blocks is empty, partial or full. The lists have the maximal length for the given sizes, but the grid
only runs the actual steps. So the work grows with the sequences.

The lists lie in scalar memory at twelve bytes per step. Without a window every pair of blocks may be a step, since a
single sequence may fill everything.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from impls.pallas_tpu.tpu_tiles import round_up
from impls.splash_tpu.splash_plan import Blocks, StepKinds
from impls.splash_tpu.splash_schedule import COMPUTE, FIRST, LAST, MASKED, PART, Order, Steps


def list_step_kinds(blocks: Blocks) -> StepKinds:
    """List the kinds of steps that may occur: all except stored masks, since nothing is known at trace time."""
    parts = blocks.parts != (blocks.q, blocks.kv)
    return StepKinds(full=True, masked=True, empty=True, stored=False, parts=parts, dead=True)


def build_packed_steps(
    low: Int32[Array, " T"],
    high: Int32[Array, " T"],
    kv_length: int,
    blocks: Blocks,
    order: Order,
    *,
    seen: int | None = None,
) -> Steps:
    """Build the steps of a call: every non-empty pair of blocks, and one step for each result block without any.

    Args:
      low: int32 `[T]`, the first key that each query sees. It grows along the queries that see any key.
      high: int32 `[T]`, one past the last key that each query sees; it grows too. Both are 0 for a query without keys.
      kv_length: S.
      blocks: block sizes.
      order: `"q"` if results are blocks of queries, `"kv"` if they are blocks of keys.
      seen: upper bound of the keys that a query sees, if there is a static one.
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
    # An idle step points to the blocks of the step before, so that nothing is fetched for it.
    column = column[lax.cummax(jnp.where(computes, number, 0))]
    q, kv = (row, column) if order == "q" else (column, row)
    lists = (x.astype(jnp.int32)[None, None, None] for x in (q, kv, flags))
    q, kv, flags = lists
    return Steps(q=q, kv=kv, head=None, flags=flags, place=None, stored=None, total=total)


def _classify_pairs(
    low: Int32[Array, " T"], high: Int32[Array, " T"], kv_length: int, blocks: Blocks
) -> tuple[Bool[Array, "q_blocks kv_blocks parts"], Bool[Array, "q_blocks kv_blocks"]]:
    """Classify the pairs of blocks.

    XLA fuses the comparisons of every query with every part of the keys, so they take no memory.

    Returns:
      booleans `[q blocks, kv blocks, parts]`: parts with an allowed pair of positions.
      booleans `[q blocks, kv blocks]`: blocks in which every pair of positions is allowed.
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
    """Bound the number of steps for this many blocks of queries and of keys.

    Key ranges only move forward, so a block of keys is seen by consecutive queries. It counts once, and once more for
    every boundary between query blocks among these queries. At most the keys of one query reach across a boundary.
    """
    if seen is None:
        return num_q * num_kv
    touched = -(-(seen - 1) // blocks.kv) + 1
    return min(num_q * num_kv, num_kv + (num_q - 1) * touched + max(num_q, num_kv))
