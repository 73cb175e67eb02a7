"""Which keys of a pack each query sees, and which blocks of keys each block of queries.

Queries and keys of a sequence lie behind one another, and a mask of sides leaves a query the keys of a stretch. So what
a query sees are the keys `low` to `high - 1` of the pack, whatever sequence it is of, and `low` and `high` grow along
the pack. All of that is known at run time only.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from impls.block_flash.schedule import Sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedPlan(Sizes):
    """Static part of a packed call; `q_length` and `kv_length` are those of the whole pack."""

    left: int | None
    right: int | None


class Tables(NamedTuple):
    """What says where sequences lie, int32."""

    cu_q_lens: jax.Array  # [max_seqs + 1]
    cu_kv_lens: jax.Array  # [max_seqs + 1]
    num_seqs: jax.Array  # [1]


class Ranges(NamedTuple):
    """What each block of queries sees, int32."""

    low: jax.Array  # [q blocks, block_q], 0 for a query that sees nothing
    high: jax.Array  # [q blocks, block_q], likewise
    first: jax.Array  # [q blocks], the first block of keys
    end: jax.Array  # [q blocks], one past the last


def ranges_of(plan: PackedPlan, tables: Tables) -> Ranges:
    """The ranges of a call. Entries of the tables past the last sequence may be any integers."""
    count = tables.num_seqs[0]
    there = jnp.arange(len(tables.cu_q_lens) - 1, dtype=jnp.int32) < count

    def ends_of(starts: jax.Array) -> jax.Array:
        return jnp.where(there, starts[1:], starts[count])

    q_ends, kv_ends = ends_of(tables.cu_q_lens), ends_of(tables.cu_kv_lens)
    token = jnp.arange(plan.num_q_blocks * plan.block_q, dtype=jnp.int32)
    sequence = jnp.searchsorted(q_ends, token, side="right").astype(jnp.int32)  # of padding: beyond all
    real = token < tables.cu_q_lens[count]
    sequence = jnp.minimum(sequence, len(q_ends) - 1)
    kv_start = tables.cu_kv_lens[sequence]
    kv_length = kv_ends[sequence] - kv_start
    position = kv_length - (q_ends[sequence] - token)
    low = jnp.zeros_like(position) if plan.left is None else jnp.maximum(position - plan.left, 0)
    high = kv_length if plan.right is None else jnp.minimum(position + (plan.right + 1), kv_length)
    some = real & (low < high)
    low, high = (jnp.where(some, kv_start + x, 0).reshape(-1, plan.block_q) for x in (low, high))
    # A query that sees nothing bounds nothing.
    first = jnp.where(low < high, low, plan.kv_length).min(axis=1) // plan.block_kv
    return Ranges(low, high, first=first, end=(high.max(axis=1) + (plan.block_kv - 1)) // plan.block_kv)


def holds_a_pair(plan: PackedPlan, low: jax.Array, high: jax.Array, kv_block: jax.Array) -> jax.Array:
    """Whether some query of a block `[block_q]` sees some key of a block of keys.

    Between the first block of keys and the last may lie some of sequences without queries, or before their windows.
    """
    start = kv_block * plan.block_kv
    return ((low < start + plan.block_kv) & (high > start)).any()


def allowed(plan: PackedPlan, low: jax.Array, high: jax.Array, kv_block: jax.Array) -> jax.Array:
    """Booleans `[1, 1, 1, block_q, block_kv]` of a pair of blocks."""
    j = kv_block * plan.block_kv + jnp.arange(plan.block_kv, dtype=jnp.int32)
    seen: jax.Array = (j >= low[:, None]) & (j < high[:, None])
    return seen[None, None, None]
