"""Steps of the TPU kernel: every block that holds a key of a sequence, one sequence after the other.

A sequence without keys has one step, which writes an empty part. That step points to the block that is in VMEM already,
so it fetches nothing. The lists are made on the device from the lengths, which may differ in every call.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from impls.ragged.ragged_plan import RaggedPlan, find_block_range


class RaggedSteps(NamedTuple):
    """Lists of steps, as long as they can get, and what they are for each batch row; int32.

    Only the first `total` steps are run.
    """

    total: jax.Array  # [], how many there are
    row: jax.Array  # [L], batch row
    kv_row: jax.Array  # [L], batch row of the block in VMEM
    kv_block: jax.Array  # [L], number of that block in its row
    blocks: jax.Array  # [B], how many hold a key


def build_steps(plan: RaggedPlan, lengths: jax.Array, positions: jax.Array, block: int) -> RaggedSteps:
    """The steps for `lengths` and `positions` `[B]`."""
    batch = lengths.shape[0]
    first, count = find_block_range(plan, lengths, positions, block)
    ends = jnp.cumsum(jnp.maximum(count, 1), dtype=jnp.int32)
    longest = batch * max(1, -(-plan.kv_length // block))
    number = jnp.arange(longest, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, number, side="right"), batch - 1).astype(jnp.int32)
    inside = number - (ends[row] - jnp.maximum(count[row], 1))
    computes = (inside < count[row]) & (number < ends[-1])
    # What a step without keys points to is what the step before fetched, or the first block that is fetched at all.
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
