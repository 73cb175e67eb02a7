"""List the grid steps of the TPU kernel: every block with a key of a sequence, one sequence after the other.

A sequence without keys has one step, which writes an empty part. That step points to the block that is in VMEM already,
so it fetches nothing. The lists are built on the device from the lengths, which may differ in every call.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from impls.ragged.ragged_plan import RaggedPlan, find_block_range


class RaggedSteps(NamedTuple):
    """Lists of steps of maximal length, and blocks per batch row; int32.

    Only the first `total` steps are run.
    """

    total: jax.Array  # [], number of steps
    row: jax.Array  # [L], batch row
    kv_row: jax.Array  # [L], batch row of the block in VMEM
    kv_block: jax.Array  # [L], index of that block in its row
    blocks: jax.Array  # [B], number of blocks with a visible key


def build_steps(plan: RaggedPlan, lengths: jax.Array, positions: jax.Array, block: int) -> RaggedSteps:
    """Build the steps for `lengths` and `positions` `[B]`."""
    batch = lengths.shape[0]
    first, count = find_block_range(plan, lengths, positions, block)
    ends = jnp.cumsum(jnp.maximum(count, 1), dtype=jnp.int32)
    longest = batch * max(1, -(-plan.kv_length // block))
    number = jnp.arange(longest, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, number, side="right"), batch - 1).astype(jnp.int32)
    inside = number - (ends[row] - jnp.maximum(count[row], 1))
    computes = (inside < count[row]) & (number < ends[-1])
    # A step without keys points to the block that the step before fetched, or to the first block of all.
    latest = lax.cummax(jnp.where(computes, number, -1))
    held = jnp.where(latest < 0, jnp.argmax(computes).astype(jnp.int32), latest)
    some = computes.any()
    return RaggedSteps(
        total=ends[-1],
        row=row,
        kv_row=jnp.where(some, row[held], 0),
        kv_block=jnp.where(some, (first[row] + inside)[held], 0),
        blocks=count,
    )
