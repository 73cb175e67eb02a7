"""Compute which blocks of keys each block of queries visits over packed sequences, from the key range of each query."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from impls.block_flash.block_schedule import FlashSizes
from impls.packed_sequences import SequenceTables, compute_key_ranges


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedPlan(FlashSizes):
    """Static part of a packed call; `q_length` and `kv_length` are total lengths over all sequences."""

    left: int | None
    right: int | None


class KeyRanges(NamedTuple):
    """Ranges of keys that each query sees, and of key blocks that each block of queries visits; int32."""

    low: Int32[Array, "q_blocks block_q"]  # first key of each query; 0 for a query that sees no key
    high: Int32[Array, "q_blocks block_q"]  # one past the last key of each query; 0 for a query that sees no key
    first: Int32[Array, " q_blocks"]  # the first block of keys to visit
    end: Int32[Array, " q_blocks"]  # one past the last block of keys to visit


def compute_ranges(plan: PackedPlan, tables: SequenceTables) -> KeyRanges:
    """Compute the key ranges of a call. Table entries past the last sequence may be any integers."""
    found = compute_key_ranges(tables, (plan.left, plan.right), plan.num_q_blocks * plan.block_q)
    low, high = (x.reshape(-1, plan.block_q) for x in found)
    # A query that sees no key must not widen the range.
    first = jnp.where(low < high, low, plan.kv_length).min(axis=1) // plan.block_kv
    return KeyRanges(low, high, first=first, end=(high.max(axis=1) + (plan.block_kv - 1)) // plan.block_kv)


def has_pair(
    plan: PackedPlan, low: Int32[Array, " block_q"], high: Int32[Array, " block_q"], kv_block: Int32[Array, ""]
) -> Bool[Array, ""]:
    """Return whether any query of a block `[block_q]` sees any key of a block of keys.

    The range of key blocks that a block of queries visits may contain unseen key blocks: keys of a sequence without
    queries, or keys before the windows of all these queries.
    """
    start = kv_block * plan.block_kv
    return ((low < start + plan.block_kv) & (high > start)).any()


def compute_allowed(
    plan: PackedPlan, low: Int32[Array, " block_q"], high: Int32[Array, " block_q"], kv_block: Int32[Array, ""]
) -> Bool[Array, "1 1 1 block_q block_kv"]:
    """Compute which positions of a pair of blocks may attend, `[1, 1, 1, block_q, block_kv]`."""
    j = kv_block * plan.block_kv + jnp.arange(plan.block_kv, dtype=jnp.int32)
    seen: Bool[Array, "block_q block_kv"] = (j >= low[:, None]) & (j < high[:, None])
    return seen[None, None, None]
