"""Which blocks of keys each block of queries of a pack sees, by the keys that each query does (`impls.packed_sequences`)."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from impls.block_flash.block_schedule import FlashSizes
from impls.packed_sequences import SequenceTables, compute_key_ranges


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedPlan(FlashSizes):
    """Static part of a packed call; `q_length` and `kv_length` are those of the whole pack."""

    left: int | None
    right: int | None


class KeyRanges(NamedTuple):
    """What each block of queries sees, int32."""

    low: jax.Array  # [q blocks, block_q], 0 for a query that sees nothing
    high: jax.Array  # [q blocks, block_q], likewise
    first: jax.Array  # [q blocks], the first block of keys
    end: jax.Array  # [q blocks], one past the last


def compute_ranges(plan: PackedPlan, tables: SequenceTables) -> KeyRanges:
    """The ranges of a call. Entries of the tables past the last sequence may be any integers."""
    found = compute_key_ranges(tables, (plan.left, plan.right), plan.num_q_blocks * plan.block_q)
    low, high = (x.reshape(-1, plan.block_q) for x in found)
    # A query that sees nothing bounds nothing.
    first = jnp.where(low < high, low, plan.kv_length).min(axis=1) // plan.block_kv
    return KeyRanges(low, high, first=first, end=(high.max(axis=1) + (plan.block_kv - 1)) // plan.block_kv)


def has_pair(plan: PackedPlan, low: jax.Array, high: jax.Array, kv_block: jax.Array) -> jax.Array:
    """Whether some query of a block `[block_q]` sees some key of a block of keys.

    Between the first block of keys and the last may lie some of sequences without queries, or before their windows.
    """
    start = kv_block * plan.block_kv
    return ((low < start + plan.block_kv) & (high > start)).any()


def compute_allowed(plan: PackedPlan, low: jax.Array, high: jax.Array, kv_block: jax.Array) -> jax.Array:
    """Booleans `[1, 1, 1, block_q, block_kv]` of a pair of blocks."""
    j = kv_block * plan.block_kv + jnp.arange(plan.block_kv, dtype=jnp.int32)
    seen: jax.Array = (j >= low[:, None]) & (j < high[:, None])
    return seen[None, None, None]
