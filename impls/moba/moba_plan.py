"""Plan a MoBA call: validate it, choose the chunks of each query, and divide the pairs of the two into blocks of rows.

Internally, the key/value heads of all batch rows are *lanes* (`L = B K`), each with the queries of its group as *rows*
(`R = G T`). A chunk of a lane's keys is a *bin*. Each row has *slots* for the chunks that it selected. The rows that
selected a bin are divided into *blocks*, as in a grouped matrix product: no block has rows of two bins, and the last
block of a bin may have padding rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cases.masks import Full, Mask
from cases.moba_mask import Moba
from impls.contract.implementation import validate_mask, validate_operands
from impls.jax_compat import Interpret


def find_moba(mask: Mask, batch: int, num_q_heads: int, q_length: int, kv_length: int) -> Moba:
    """Return the `Moba` mask. Raises `NotImplementedError` for any other, `ValueError` for one that does not fit."""
    if isinstance(mask, Moba):
        mask.check_lengths(q_length, kv_length)
        return mask
    try:
        validate_mask(mask, batch, num_q_heads, q_length, kv_length)
    except NotImplementedError as error:
        raise NotImplementedError("moba: not combined with another mask") from error
    name = "full" if isinstance(mask, Full) else type(mask).__name__
    raise NotImplementedError(f"{name}: only Moba masks; other masks have kernels of their own")


def validate_moba(
    q: Any, k: Any, v: Any, *, mask: Mask, segment_ids: tuple[jax.Array, jax.Array] | None, **options: Any
) -> Moba:
    """Validate the operands of a MoBA call and return its mask.

    Raises:
      ValueError: an operand or an option is wrong; the message names it.
      NotImplementedError: there are segment ids, or the mask is not a `Moba` mask.
    """
    validate_operands(q, k, v, segment_ids=segment_ids, **options)
    if segment_ids is not None:
        raise NotImplementedError("segment_ids: whether the mean of a chunk takes in other segments is not defined")
    return find_moba(mask, q.shape[0], q.shape[2], q.shape[1], k.shape[1])


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
        """Rows per block, a power of two: about half the average rows per bin, so that there are few padding rows."""
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
    """Divide the rows into blocks by selected chunks: int32 indices `chosen [L, R, slots]`, `C` for empty slots."""
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


_ROWS_AT_ONCE = 256  # queries whose gates are in memory at once


def choose_chunks(moba: Moba, q: Array, k: Array, position: Array) -> Array:
    """Select the chunks of each query, int32 `[L, R, slots]`: its own chunk first, and `C` in empty slots.

    Args:
      q: queries of each key/value head, `[L, R, H]`.
      k: keys of each key/value head, `[L, C, chunk, H]`. The last chunk is zero-padded. Its mean is never used, since
        no query is in a later chunk.
      position: position of each query among the keys, `[R]`.
    """
    chunks = k.shape[1]
    own = jnp.broadcast_to((position // moba.chunk)[None, :, None], (*q.shape[:2], 1))
    others = min(moba.topk - 1, chunks - 1)
    if others == 0:
        return own
    means = k.astype(jnp.float32).mean(axis=2)  # [L, C, H]

    def of_rows(rows: tuple[Array, Array]) -> Array:
        some, own = rows  # [L, rows, H], [L, rows, 1]
        queries = some.astype(jnp.float32)

        def gate(mean: Array) -> Array:
            return jnp.einsum("lrh,lh->lr", queries, mean, precision=lax.Precision.HIGHEST)

        # One product per chunk, so that equal chunks tie exactly: in a single product over all chunks the last bit of
        # a gate depends on its column.
        gates = jnp.moveaxis(lax.map(gate, means.swapaxes(0, 1)), 0, -1)
        gates = jnp.where(jnp.arange(chunks, dtype=jnp.int32) < own, gates, -jnp.inf)
        return lax.top_k(gates, others)[1]  # of equal gates, the lower index comes first

    rows = min(_ROWS_AT_ONCE, q.shape[1])
    chosen = _join_rows(lax.map(of_rows, (_split_rows(q, rows), _split_rows(own, rows))), q.shape[1]).astype(jnp.int32)
    return jnp.concatenate([own, jnp.where(chosen < own, chosen, chunks)], axis=-1)


def _split_rows(x: Array, rows: int) -> Array:
    """Split rows `[L, R, D]` into `[blocks, L, rows, D]`."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % rows), (0, 0)))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, rows, x.shape[2]), 1, 0)


def _join_rows(x: Array, rows: int) -> Array:
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, x.shape[-1])[:, :rows]
