"""Which work there is: pairs of a query and a chunk that it takes, sorted by chunk and cut in blocks of rows.

Inside, the key/value heads of all batch rows are *lanes* (`L = B K`), each with the queries of its group as *rows*
(`R = G T`). A chunk of a lane is a *bin*. The queries that take it are the rows of its blocks, as in a grouped matrix
product: no block has rows of two bins, and the last block of a bin may have rows to spare.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cases.moba import Moba

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about a call."""

    moba: Moba
    batch: int
    num_q_heads: int
    num_kv_heads: int
    q_length: int
    kv_length: int  # up to the last query: nobody attends to what comes after
    scale: float
    soft_cap: float | None
    bias_shape: tuple[int, ...] | None
    most_rows: int

    @property
    def group(self) -> int:
        """Query heads of a key/value head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def rows(self) -> int:
        """Rows of a lane."""
        return self.group * self.q_length

    @property
    def lanes(self) -> int:
        """Key/value heads of all batch rows."""
        return self.batch * self.num_kv_heads

    @property
    def chunks(self) -> int:
        """Chunks of a lane."""
        return self.moba.chunks(self.kv_length)

    @property
    def bins(self) -> int:
        """Chunks of all lanes."""
        return self.lanes * self.chunks

    @property
    def slots(self) -> int:
        """Chunks that a query takes at most."""
        return min(self.moba.topk, self.chunks)

    @property
    def pairs(self) -> int:
        """Slots of all rows."""
        return self.lanes * self.rows * self.slots

    @property
    def block_rows(self) -> int:
        """Rows of a block: about half of what a bin has on average, so that few are to spare, and a power of two."""
        half = self.pairs // (2 * self.bins)
        return min(self.most_rows, max(16, 1 << max(0, half - 1).bit_length()))

    @property
    def most_blocks(self) -> int:
        """Blocks that there are at most, however queries choose."""
        in_a_bin = -(-self.rows // self.block_rows)
        return min(self.pairs // self.block_rows + self.bins, self.bins * in_a_bin)

    @property
    def position(self) -> Array:
        """Position of each row of a lane among the keys, int32 `[R]`."""
        row = jnp.arange(self.rows, dtype=jnp.int32)
        return row % self.q_length + self.moba.offset


class Work(NamedTuple):
    """The blocks, int32 throughout."""

    in_use: Array  # how many blocks have rows, []
    bins: Array  # of each block, [blocks]
    rows: Array  # among the rows of all lanes, `L R` where a block has one to spare, [blocks, block_rows]
    places: Array  # where each slot of each row went among `blocks * block_rows`, that many if nowhere, [L R, slots]


def divide(plan: Plan, chosen: Array) -> Work:
    """The blocks of rows that take `chosen`, int32 `[L, R, slots]`, chunks of their lane or `C` for an empty slot."""
    lane = jnp.arange(plan.lanes, dtype=jnp.int32)[:, None, None]
    bins = jnp.where(chosen < plan.chunks, lane * plan.chunks + chosen, plan.bins).reshape(-1)
    order = jnp.argsort(bins, stable=True).astype(jnp.int32)
    counts = jnp.bincount(bins, length=plan.bins).astype(jnp.int32)  # empty slots fall off the end
    pairs_before, blocks = _before(counts), -(-counts // plan.block_rows)
    blocks_before = _before(blocks)

    number = jnp.arange(plan.most_blocks, dtype=jnp.int32)
    bin_of = jnp.searchsorted(blocks_before + blocks, number, side="right").astype(jnp.int32)
    bin_of = jnp.minimum(bin_of, plan.bins - 1)
    within = (number - blocks_before[bin_of])[:, None] * plan.block_rows
    within = within + jnp.arange(plan.block_rows, dtype=jnp.int32)
    exists = within < counts[bin_of][:, None]
    pair = order[jnp.minimum(pairs_before[bin_of][:, None] + within, plan.pairs - 1)]
    rows = jnp.where(exists, pair // plan.slots, plan.lanes * plan.rows)

    rank = jnp.zeros(plan.pairs, jnp.int32).at[order].set(jnp.arange(plan.pairs, dtype=jnp.int32), unique_indices=True)
    bin_or_none = jnp.minimum(bins, plan.bins - 1)
    place = blocks_before[bin_or_none] * plan.block_rows + rank - pairs_before[bin_or_none]
    place = jnp.where(bins < plan.bins, place, plan.most_blocks * plan.block_rows)
    return Work(blocks.sum().astype(jnp.int32), bin_of, rows, place.reshape(-1, plan.slots))


def _before(counts: Array) -> Array:
    """The sum of all that come before each."""
    return jnp.cumsum(counts, dtype=jnp.int32) - counts
