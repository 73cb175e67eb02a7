"""Paged attention in plain JAX: a loop over tiles of queries, and for each a loop over the blocks of pages it sees.

It computes equations (1) to (6) of `impls/__init__.py`. `max`, `sum` and `out` of a `Part` are m, l and the sum of (6),
kept for the keys so far. A block that raises m
multiplies the others by `decay = exp(old m - new m)` (Milakov and Gimelshein 2018, arXiv:1805.02867). Sinks and the
division come later, since the result is a part (`impls.softmax_merge`).

Both loops are as long as the tables require (`impls.paged.paged_plan`). At most one block of pages is gathered from
the cache at a time. The page table is that of Kwon et al. 2023, arXiv:2309.06180.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from impls.block_arithmetic import multiply, replace_neg_inf
from impls.paged.paged_plan import (
    Operands,
    PagedPlan,
    PageScales,
    QueryTiles,
    build_tiles,
    compute_allowed,
    compute_changed_logits,
    find_block_range,
)
from impls.softmax_merge import Part


def attend(plan: PagedPlan, operands: Operands) -> Part:
    """Attend to every key that each query sees; rows past the last sequence are parts without keys (`max` is -inf)."""
    total, heads = operands.q.shape[:2]
    # Padded for a tile that begins with the last query, so that no slice is shifted to fit.
    rows = (total + plan.block_q, heads)
    depth_v = plan.value_dim if operands.v_pages is None else operands.v_pages.shape[-1]
    nothing = Part(
        out=jnp.zeros((*rows, depth_v), jnp.float32),
        max=jnp.full((*rows, 1), -jnp.inf, jnp.float32),
        sum=jnp.zeros((*rows, 1), jnp.float32),
    )
    pages_per_seq = operands.page_indices.shape[1]
    more = (0, plan.block_q)
    longer = operands._replace(
        q=jnp.pad(operands.q, (more, (0, 0), (0, 0))),
        mask=None if operands.mask is None else jnp.pad(operands.mask, (more, (0, 0))),
        tree_mask=None if operands.tree_mask is None else jnp.pad(operands.tree_mask, (more, (0, 0))),
        page_indices=jnp.pad(operands.page_indices, ((0, 0), (0, -pages_per_seq % plan.block_pages))),
    )
    tiles = build_tiles(operands, plan.block_q)
    found: Part = lax.fori_loop(
        jnp.int32(0), tiles.total, functools.partial(_attend_tile, plan, longer, tiles), nothing
    )
    return Part(*(x[:total] for x in found))


def _attend_tile(plan: PagedPlan, operands: Operands, tiles: QueryTiles, number: jax.Array, found: Part) -> Part:
    """Compute one more tile, and write its rows into the results."""
    row, queries, position = tiles.row[number], tiles.queries[number], tiles.position[number]
    num_kv_heads = operands.k_pages.shape[2]
    q = _flatten_queries(lax.dynamic_slice_in_dim(operands.q, row, plan.block_q), num_kv_heads)
    nothing = Part(*(jnp.zeros((*q.shape[:2], x.shape[-1]), jnp.float32) for x in found))
    nothing = nothing._replace(max=jnp.full_like(nothing.max, -jnp.inf))
    sequence = tiles.sequence[number]
    keys = operands.kv_lens[sequence]
    first, end = find_block_range(plan, position, queries, plan.block_pages * operands.k_pages.shape[1], keys)
    before = keys - (operands.cu_q_lens[sequence + 1] - operands.cu_q_lens[sequence])
    tile = _Tile(sequence, row, queries, position, keys, before)
    add = functools.partial(_add_block, plan, operands, q, tile)
    part: Part = lax.fori_loop(jnp.int32(first), jnp.int32(end), add, nothing)
    is_own = (jnp.arange(plan.block_q, dtype=jnp.int32) < queries)[:, None, None]

    def put(x: jax.Array, of_tile: jax.Array) -> jax.Array:
        old = lax.dynamic_slice_in_dim(x, row, plan.block_q)
        new = jnp.where(is_own, _restore_queries(of_tile, plan.block_q), old)
        return lax.dynamic_update_slice_in_dim(x, new, row, axis=0)

    return Part(*map(put, found, part))


class _Tile(NamedTuple):
    """Queries of one sequence that are computed together; int32."""

    sequence: jax.Array
    row: jax.Array  # index of the first query in `q`
    queries: jax.Array  # number of queries
    position: jax.Array  # position of the first query
    keys: jax.Array  # number of keys of the sequence
    before: jax.Array  # number of keys before those of the sequence's queries


def _add_block(
    plan: PagedPlan,
    operands: Operands,
    q: jax.Array,  # [K, R, H]
    tile: _Tile,
    number: jax.Array,
    old: Part,
) -> Part:
    """Update the online softmax of a tile with one more block of pages."""
    # Entries past the sequence's pages may be any integers; no query sees the keys of such pages.
    pages = operands.page_indices[tile.sequence]
    named = lax.dynamic_slice_in_dim(pages, number * plan.block_pages, plan.block_pages)
    named = jnp.clip(named, 0, len(operands.k_pages) - 1)
    rows = functools.partial(_gather_tokens, named, tile.sequence, dtype=q.dtype)
    k = rows(operands.k_pages, operands.k_scales, operands.k_stored)  # [block, K, H]
    v = (
        k[..., : plan.value_dim]
        if operands.v_pages is None
        else rows(operands.v_pages, operands.v_scales, operands.v_stored)
    )
    q = q.astype(k.dtype)
    j = number * len(k) + jnp.arange(len(k), dtype=jnp.int32)
    t = jnp.arange(q.shape[1], dtype=jnp.int32) // (q.shape[1] // plan.block_q)
    position = (tile.position + t)[:, None]
    sees = compute_allowed(plan, position, j, tile.keys) & (t < tile.queries)[:, None]  # [R, block]
    sees = sees & _look_up_masks(plan, operands, tile, t, j)
    products = multiply("krh,skh->krs", q, k)
    n = jnp.arange(len(q), dtype=jnp.int32)[:, None, None] * (q.shape[1] // plan.block_q)
    n = n + (jnp.arange(q.shape[1], dtype=jnp.int32) % (q.shape[1] // plan.block_q))[:, None]  # query head, [K, R, 1]
    if plan.mask_mod is not None:
        sees = sees & plan.mask_mod(tile.sequence, n, position, j)
    of_heads = (operands.logit_scale, operands.alibi_slopes)
    factor, slopes = (None if x is None else x[n] for x in of_heads)
    z = compute_changed_logits(plan, products, lambda: (tile.sequence, n, position, j), factor=factor, slopes=slopes)
    z = jnp.where(sees, z, -jnp.inf)  # hidden pairs get -inf, equation (3)
    top = jnp.maximum(old.max, z.max(axis=-1, keepdims=True))  # maximum, equation (4)
    weights, decay = jnp.exp(z - replace_neg_inf(top)), jnp.exp(old.max - replace_neg_inf(top))
    # Values that no query sees may be NaN, and 0 * NaN is not 0.
    some = sees.any(axis=-2)  # [block], or [K, block] where the mask differs by head
    v = jnp.where(jnp.atleast_2d(some).T[..., None], v, jnp.zeros_like(v))
    return Part(
        out=old.out * decay + multiply("krs,skv->krv", weights.astype(v.dtype), v),  # weighted sum of values, eq. (6)
        max=top,
        sum=old.sum * decay + weights.sum(axis=-1, keepdims=True),  # sum of weights, equation (5)
    )


def _look_up_masks(plan: PagedPlan, operands: Operands, tile: _Tile, t: jax.Array, j: jax.Array) -> Any:
    """Look up which keys `j` the tile's queries `t [R]` see by the masks that are arrays, `[R, block]`."""
    sees: Any = jnp.bool_(True)
    for mask, first in ((operands.mask, jnp.int32(0)), (operands.tree_mask, tile.before)):
        if mask is not None:
            rows = lax.dynamic_slice_in_dim(mask, tile.row, plan.block_q)
            sees = sees & ((j < first) | rows[:, jnp.clip(j - first, 0, mask.shape[1] - 1)][t])
    return sees


def _gather_tokens(
    named: jax.Array,
    sequence: jax.Array,
    pages: jax.Array,
    scales: jax.Array | None,
    stored: PageScales | None,
    *,
    dtype: Any,
) -> jax.Array:
    """Gather the tokens of a sequence's named pages, `[tokens, K, .]`, in `dtype`; in f32 if there are scales."""
    rows = pages[named]
    if scales is not None:
        rows = rows.astype(jnp.float32) * scales[named][..., None]
    elif stored is not None:
        rows = _dequantize(rows.astype(jnp.float32), named, sequence, stored)
    elif rows.dtype != dtype:  # 8-bit numbers, which every dtype of q represents exactly
        rows = rows.astype(jnp.float32).astype(dtype)
    return rows.reshape(-1, *pages.shape[2:])


def _dequantize(rows: jax.Array, named: jax.Array, sequence: jax.Array, stored: PageScales) -> jax.Array:
    """Turn the numbers of the named pages, f32 `[n, page_size, K, D]`, into keys or values."""

    def spread(x: jax.Array) -> jax.Array:
        return jnp.repeat(x[named].astype(jnp.float32), rows.shape[-1] // x.shape[-1], axis=-1)

    if stored.scales is not None:
        rows = rows * spread(stored.scales)
    if stored.zeros is not None:
        rows = rows + spread(stored.zeros)
    return rows if stored.sequences is None else rows * stored.sequences[sequence][:, None]


def _flatten_queries(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """Flatten queries `[T, N, H]` to rows `[K, T * G, H]`: the heads of a group are rows that share its keys."""
    queries, heads, depth = q.shape
    grouped = q.reshape(queries, num_kv_heads, heads // num_kv_heads, depth)
    return grouped.swapaxes(0, 1).reshape(num_kv_heads, -1, depth)


def _restore_queries(x: jax.Array, queries: int) -> jax.Array:
    """Invert `_flatten_queries`: `[K, T * G, .]` to `[T, N, .]`."""
    split = x.reshape(x.shape[0], queries, -1, x.shape[-1])
    return split.swapaxes(0, 1).reshape(queries, -1, x.shape[-1])
