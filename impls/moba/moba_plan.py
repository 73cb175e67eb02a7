"""Divide the work of MoBA: sort pairs of a query and one of its chunks by chunk, and split them into blocks of rows.

Internally, the key/value heads of all batch rows are *lanes* (`L = B K`), each with the queries of its group as *rows*
(`R = G T`). A chunk of a lane's keys is a *bin*. Each row has *slots* for the chunks that it selected. The rows that
selected a bin are divided into *blocks*, as in a grouped matrix product: no block has rows of two bins, and the last
block of a bin may have padding rows.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cases.moba_mask import Moba
from impls.jax_compat import Interpret

Array = jax.Array
Backend = Literal["portable", "tpu"]


@dataclasses.dataclass(frozen=True)
class MobaPlan:
    """Static part of a MoBA call: mask, sizes, scale, soft cap and choice of kernel."""

    moba: Moba
    batch: int
    num_q_heads: int
    num_kv_heads: int
    q_length: int
    kv_length: int  # up to the last query's position: later keys are never attended to
    scale: float
    soft_cap: float | None
    bias_shape: tuple[int, ...] | None
    most_rows: int
    backend: Backend = "portable"
    keys_together: int = 1024  # keys of a chunk that the TPU kernels compute at once, a multiple of 128
    interpret: Interpret = False  # `interpret` of the `pallas_call` of the TPU kernels

    @property
    def group(self) -> int:
        """Number of query heads per key/value head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def rows(self) -> int:
        """Number of rows per lane, `R`."""
        return self.group * self.q_length

    @property
    def lanes(self) -> int:
        """Number of lanes, `L`: key/value heads of all batch rows."""
        return self.batch * self.num_kv_heads

    @property
    def chunks(self) -> int:
        """Number of chunks per lane, `C`."""
        return self.moba.count_chunks(self.kv_length)

    @property
    def bins(self) -> int:
        """Number of bins: chunks of all lanes."""
        return self.lanes * self.chunks

    @property
    def slots(self) -> int:
        """Number of slots per row: the largest number of chunks that a query selects."""
        return min(self.moba.topk, self.chunks)

    @property
    def pairs(self) -> int:
        """Number of slots of all rows: the largest number of pairs of a row and a selected chunk."""
        return self.lanes * self.rows * self.slots

    @property
    def block_rows(self) -> int:
        """Number of rows per block, a power of two.

        It is about half of the average number of rows per bin, so that there are few padding rows.
        """
        half = self.pairs // (2 * self.bins)
        return min(self.most_rows, max(16, 1 << max(0, half - 1).bit_length()))

    @property
    def most_blocks(self) -> int:
        """Upper bound of the number of blocks, for any selection of chunks."""
        in_a_bin = -(-self.rows // self.block_rows)
        return min(self.pairs // self.block_rows + self.bins, self.bins * in_a_bin)

    @property
    def position(self) -> Array:
        """Position of each row of a lane among the keys, int32 `[R]`."""
        row = jnp.arange(self.rows, dtype=jnp.int32)
        return row % self.q_length + self.moba.offset


class MobaWork(NamedTuple):
    """The division of a call's rows into blocks; all arrays are int32."""

    in_use: Array  # [], number of blocks that have rows; the blocks after them are not computed
    bins: Array  # [blocks], bin of each block
    rows: Array  # [blocks, block_rows], index of each row among the rows of all lanes; `L R` for padding rows
    places: Array  # [L R, slots], place of each slot in `rows`, flattened; `blocks * block_rows` for empty slots


def divide_work(plan: MobaPlan, chosen: Array) -> MobaWork:
    """Divide the rows into blocks by the chunks that they selected.

    `chosen`, int32 `[L, R, slots]`, has the indices of these chunks in their lane, and `C` for an empty slot.
    """
    lane = jnp.arange(plan.lanes, dtype=jnp.int32)[:, None, None]
    bins = jnp.where(chosen < plan.chunks, lane * plan.chunks + chosen, plan.bins).reshape(-1)
    number = jnp.arange(plan.pairs, dtype=jnp.int32)
    in_order, pair = lax.sort((bins, number), num_keys=1)
    counts = jnp.zeros(plan.bins, jnp.int32).at[bins].add(1, mode="drop")  # empty slots are out of bounds and dropped
    blocks = -(-counts // plan.block_rows)
    pairs_before, blocks_before = lax.cumsum(counts) - counts, lax.cumsum(blocks) - blocks

    # The first pair of a bin is the first row of a block, and the other pairs of the bin follow. Empty slots are placed
    # past the end.
    starts = blocks_before * plan.block_rows - pairs_before
    size = plan.most_blocks * plan.block_rows
    place = jnp.where(in_order < plan.bins, number + starts.at[in_order].get(mode="clip"), size)
    padding = jnp.full(size, plan.lanes * plan.rows, jnp.int32)
    rows = padding.at[place].set(pair // plan.slots, mode="drop")
    places = jnp.zeros(plan.pairs, jnp.int32).at[pair].set(place, unique_indices=True)
    begins = jnp.zeros(plan.most_blocks, jnp.int32).at[blocks_before].add(1, mode="drop")
    return MobaWork(
        in_use=blocks.sum(dtype=jnp.int32),
        bins=lax.cumsum(begins) - 1,
        rows=rows.reshape(plan.most_blocks, plan.block_rows),
        places=places.reshape(-1, plan.slots),
    )
