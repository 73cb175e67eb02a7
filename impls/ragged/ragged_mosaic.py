"""Decode attention over a padded cache for Hopper: the Mosaic GPU kernel of `impls.pallas_gpu.mosaic_decode`.

A padded cache is a cache in pages: the pages of a sequence are consecutive. So the kernel reads it in place. As in
`impls.ragged.ragged_gpu`, the keys of a sequence are split over programs, and their parts are merged at the end.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from impls.jax_compat import Interpret, count_multiprocessors
from impls.pallas_gpu.mosaic_decode import (
    MIN_PAGE_ROWS,
    TILE_KEYS,
    DecodeShape,
    Shares,
    VisibleKeys,
    attend_to_shares,
    count_slots,
    find_decode_limit,
    find_shape_limit,
)
from impls.pallas_gpu.mosaic_tiles import ROWS, round_up
from impls.ragged.ragged_plan import Operands, RaggedPlan, find_block_range, find_key_range
from impls.softmax_merge import Part, merge_axis


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Sizes of a call. The rows of a key/value head are cut into tiles of at most `ROWS` rows."""

    batch: int
    heads: int
    row_tiles: int
    rows: int  # rows per tile
    splits: int

    @property
    def tiles(self) -> int:
        return self.batch * self.row_tiles


def attend(plan: RaggedPlan, operands: Operands, *, num_splits: int | None, interpret: Interpret) -> Part:
    """Attend to every key that exists; the part has arrays `[B, K, R, .]`.

    `num_splits` programs share a sequence; by default, as many as fill the GPU.
    """
    sizes = _build_sizes(plan, operands, num_splits)
    page_size = math.gcd(plan.kv_length, TILE_KEYS)
    pages = sizes.batch * plan.kv_length // page_size
    shares = _split_keys(plan, operands, sizes)
    found = attend_to_shares(
        DecodeShape(
            head_dim=operands.q.shape[3],
            v_head_dim=operands.v.shape[3],
            rows=sizes.rows,
            columns=sizes.heads,
            columns_per_head=1,
            page_size=page_size,
            dtype=operands.q.dtype,
            stored_dtype=operands.k.dtype,
            scale=plan.scale,
            soft_cap=plan.soft_cap,
            interpret=interpret,
        ),
        _cut_queries(operands.q, sizes),
        operands.k.reshape(pages, page_size, *operands.k.shape[2:]),
        operands.v.reshape(pages, page_size, *operands.v.shape[2:]),
        jnp.arange(pages, dtype=jnp.int32).reshape(sizes.batch, -1),
        jnp.arange(sizes.tiles, dtype=jnp.int32) // sizes.row_tiles,
        shares,
        _find_visible_keys(plan, operands, sizes),
    )
    shape = (sizes.batch, sizes.row_tiles, sizes.splits, sizes.heads, sizes.rows)
    # The parts of empty shares are not written. A part whose sum is 0 counts as empty, whatever else it holds.
    some = (shares.first < shares.end).reshape(*shape[:3], 1, 1)
    total = jnp.where(some, found.sum.reshape(shape), 0.0)
    parts = Part(found.out.reshape(*shape, -1), found.max.reshape(shape)[..., None], total[..., None])
    merged = merge_axis(parts, axis=2)
    return Part(*(_join_rows(x, operands.q.shape[2]) for x in merged))


def find_misfit(
    interpret: Interpret, dtype: jnp.dtype[jnp.generic], head_dim: int, v_head_dim: int, kv_length: int
) -> str | None:
    """Return what the kernel does not support about a call, or None if it supports the call."""
    limit = find_cache_limit(head_dim, v_head_dim, kv_length)
    return find_decode_limit(interpret, dtype, head_dim, v_head_dim, TILE_KEYS, ROWS) or limit


def find_cache_limit(head_dim: int, v_head_dim: int, kv_length: int) -> str | None:
    """Return what the kernel does not support about these sizes, or None if it supports them."""
    if kv_length % MIN_PAGE_ROWS:
        return f"k and v with room for {kv_length} keys: it takes multiples of {MIN_PAGE_ROWS}"
    return find_shape_limit(head_dim, v_head_dim, TILE_KEYS)


def _build_sizes(plan: RaggedPlan, operands: Operands, num_splits: int | None) -> _Sizes:
    batch, heads, rows, depth = operands.q.shape
    row_tiles = -(-rows // ROWS)
    if num_splits is None:
        _, together = count_slots(depth, operands.v.shape[3], operands.k.dtype)
        num_splits = -(-count_multiprocessors() * together // (batch * heads * row_tiles))
    return _Sizes(
        batch=batch,
        heads=heads,
        row_tiles=row_tiles,
        rows=min(ROWS, round_up(rows, MIN_PAGE_ROWS)),
        splits=max(1, min(num_splits, -(-plan.kv_length // TILE_KEYS))),
    )


def _split_keys(plan: RaggedPlan, operands: Operands, sizes: _Sizes) -> Shares:
    """Split the blocks of each tile's sequence into equal shares."""
    first, count = find_block_range(plan, operands.lengths, operands.positions, TILE_KEYS)
    first, count = (jnp.repeat(x, sizes.row_tiles)[:, None] for x in (first, count))
    share = (count + (sizes.splits - 1)) // sizes.splits
    split = jnp.arange(sizes.splits, dtype=jnp.int32)[None, :]
    begin = first + jnp.minimum(split * share, count)
    end = first + jnp.minimum((split + 1) * share, count)
    tile = jnp.repeat(jnp.arange(sizes.tiles, dtype=jnp.int32), sizes.splits)
    return Shares(tile, begin.reshape(-1), end.reshape(-1))


def _find_visible_keys(plan: RaggedPlan, operands: Operands, sizes: _Sizes) -> VisibleKeys:
    row = jnp.arange(sizes.row_tiles * ROWS, dtype=jnp.int32)
    # Rows of padding see the same keys as the last query.
    position = operands.positions[:, None] + jnp.minimum(row // plan.group, plan.q_length - 1)[None, :]
    low, high = find_key_range(plan, operands.lengths[:, None], position)
    return VisibleKeys(*(jnp.broadcast_to(x, position.shape).reshape(sizes.tiles, ROWS) for x in (low, high)))


def _cut_queries(q: jax.Array, sizes: _Sizes) -> jax.Array:
    """Cut queries `[B, K, R, H]` into tiles `[B * row_tiles * K, rows, H]`, padded with zeros."""
    padded = jnp.pad(q, ((0, 0), (0, 0), (0, sizes.row_tiles * sizes.rows - q.shape[2]), (0, 0)))
    cut = padded.reshape(sizes.batch, sizes.heads, sizes.row_tiles, sizes.rows, -1).swapaxes(1, 2)
    return cut.reshape(sizes.tiles * sizes.heads, sizes.rows, -1)


def _join_rows(x: jax.Array, rows: int) -> jax.Array:
    """Join the rows of tiles `[B, row_tiles, K, rows, .]` to `[B, K, R, .]`."""
    batch, _, heads, _, columns = x.shape
    return x.swapaxes(1, 2).reshape(batch, heads, -1, columns)[:, :, :rows]
