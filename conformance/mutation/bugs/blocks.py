"""Bugs of the block map: which tiles are visited, which are masked, and with which part of the mask."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from conformance.mutation.kernels.block_triggers import (
    by_batch,
    by_head,
    empty_before,
    empty_tile,
    holes,
    kinds_by_batch,
    kinds_by_head,
    late_start,
    masked,
    mixed,
    only_whole_tiles,
    several_blocks,
)
from conformance.mutation.kernels.blockwise import planted
from conformance.mutation.kernels.layout import BLOCK_KV, BLOCK_Q, EMPTY, FULL, PARTIAL, Call
from conformance.mutation.kernels.steps import Block, classify
from conformance.mutation.planted_bug import PlantedBug

_bug = functools.partial(planted, family="blocks")
_SHOWS = ("out", "out_with_residuals", "logsumexp", "max_logits", "dq", "dk", "dv")
_WRAP = 512 // BLOCK_KV


def _first_active(kinds: jax.Array) -> jax.Array:
    active = kinds != EMPTY
    return active & (jnp.cumsum(active, axis=0) == 1)


def _last_active(kinds: jax.Array) -> jax.Array:
    return _first_active(kinds[::-1])[::-1]


def _key_blocks(kinds: jax.Array) -> jax.Array:
    """Index of the key block, shaped like `kinds`."""
    return jnp.arange(kinds.shape[0]).reshape(-1, 1, 1, 1, 1)


def _shrunk_grid(tiles: jax.Array, kinds: jax.Array, call: Call) -> jax.Array:
    """The mask tile of the grid step, where that of the key block is meant."""
    step = jnp.maximum(jnp.cumsum(kinds != EMPTY, axis=0) - 1, 0)
    return jnp.take_along_axis(tiles, step[..., None, None], axis=0)


def _without_empty_rows(x: jax.Array, kinds: jax.Array) -> jax.Array:
    """Query tiles that have something move up to fill the places of those that have nothing."""
    empty = (kinds == EMPTY).all(axis=0, keepdims=True)
    order = jnp.argsort(empty, axis=4, stable=True)
    return jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 5)), axis=4)


def _by_first_cell(tiles: jax.Array) -> jax.Array:
    return jnp.where(tiles[..., 0, 0], FULL, classify(tiles).clip(max=PARTIAL))


def _by_top_right(tiles: jax.Array) -> jax.Array:
    """Right for causal masks, whose other cells follow from that corner."""
    return jnp.where(tiles[..., 0, -1], FULL, classify(tiles))


def _by_diagonal_corners(tiles: jax.Array) -> jax.Array:
    return jnp.where(tiles[..., 0, 0] & tiles[..., -1, -1], FULL, classify(tiles))


def _no_list_without_partial(kinds: jax.Array, call: Call) -> jax.Array:
    has_partial = (kinds == PARTIAL).any(axis=(0, 4), keepdims=True)
    return jnp.where(has_partial, kinds, FULL)


def _without_floored_diagonal(kinds: jax.Array, call: Call) -> jax.Array:
    """The last key block of a query tile, `ceil` of its last row's position, comes out one short."""
    floored = (jnp.arange(kinds.shape[4]) + 1) * BLOCK_Q % BLOCK_KV != 0
    return jnp.where(_last_active(kinds) & (kinds == PARTIAL) & floored, EMPTY, kinds)


def _without_ceiled_start(kinds: jax.Array, call: Call) -> jax.Array:
    return jnp.where(_first_active(kinds) & (kinds == PARTIAL) & (_key_blocks(kinds) > 0), EMPTY, kinds)


def _until_first_empty(kinds: jax.Array, call: Call) -> jax.Array:
    return kinds * jnp.cumprod(kinds != EMPTY, axis=0)


def _holes_attended(kinds: jax.Array, call: Call) -> jax.Array:
    active = kinds != EMPTY
    before, after = jnp.cumsum(active, axis=0) > 0, jnp.cumsum(active[::-1], axis=0)[::-1] > 0
    return jnp.where(before & after & ~active, FULL, kinds)


def _rows_in_key_blocks(x: jax.Array) -> jax.Array:
    """Row tile `i` is taken from row `i * BLOCK_KV`."""
    tiles = x.shape[4]
    rows = jnp.minimum(jnp.arange(tiles) * (BLOCK_KV // BLOCK_Q), tiles - 1)
    return x[:, :, :, :, rows]


def _columns_in_blocks(tiles: jax.Array) -> jax.Array:
    """Key block `j` starts at column `j`, not `j * BLOCK_KV`."""
    flat = jnp.moveaxis(tiles, 0, -2)
    flat = flat.reshape(*flat.shape[:-2], -1)
    return jnp.stack([flat[..., j : j + BLOCK_KV] for j in range(tiles.shape[0])])


def _twice_if_partial(z: jax.Array, shift: jax.Array, block: Block) -> jax.Array:
    return jnp.exp(z - shift[..., None]) * jnp.where(block.kind_by_row == PARTIAL, 2.0, 1.0)


def _in_key_blocks_of_empty(tiles: jax.Array, kinds: jax.Array, call: Call) -> jax.Array:
    return _rows_in_key_blocks(tiles)


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        name="block-mask-of-shrunk-grid-step",
        says="Tiles take their mask by grid step, which counts visited tiles only, not by key block.",
        kind="mask.kvindex-shrunk",
        reference="jax f15f9717c3",
        shows=_SHOWS,
        trigger=late_start,
        mask_tiles=_shrunk_grid,
    ),
    _bug(
        name="block-map-loses-empty-query-tiles",
        says="Query blocks without keys drop out of the block map, so later masks move up.",
        kind="mask.empty-row-info",
        reference="jax 55c9ed614c",
        shows=_SHOWS,
        trigger=empty_before,
        classify=lambda tiles: _without_empty_rows(classify(tiles), classify(tiles)),
        mask_tiles=lambda tiles, kinds, call: _without_empty_rows(tiles, classify(tiles)),
    ),
    _bug(
        name="block-map-without-partial-tiles-lost",
        says="A mask made of whole tiles only is ignored: every tile counts as fully visible.",
        kind="mask.no-partial-blocks",
        reference="tokamax 620ac16",
        shows=_SHOWS,
        trigger=only_whole_tiles,
        kinds=_no_list_without_partial,
    ),
    _bug(
        name="block-full-by-first-cell",
        says="A tile counts as fully visible if its first query may see its first key.",
        kind="I.partial-as-full",
        reference="inferred from pytorch#182593",
        shows=_SHOWS,
        trigger=masked,
        classify=_by_first_cell,
    ),
    _bug(
        name="block-full-by-top-right-cell",
        says="A tile counts as fully visible if its first query may see its last key.",
        kind="I.partial-as-full",
        reference="inferred from pytorch#182593",
        shows=_SHOWS,
        trigger=lambda case: "window" in case.mask or "dense" in case.mask,
        classify=_by_top_right,
    ),
    _bug(
        name="block-full-by-diagonal-cells",
        says="A tile counts as fully visible if its top left and bottom right cells are visible.",
        kind="I.partial-as-full",
        reference="inferred from pytorch#182593",
        shows=_SHOWS,
        trigger=masked,
        classify=_by_diagonal_corners,
    ),
    _bug(
        name="block-full-if-partial",
        says="Partly masked tiles are computed without their mask.",
        kind="flex.default-blocksize",
        reference="bd3lms#23",
        shows=_SHOWS,
        trigger=masked,
        kinds=lambda kinds, call: jnp.where(kinds == PARTIAL, FULL, kinds),
    ),
    _bug(
        name="block-empty-if-partial",
        says="Partly masked tiles are skipped as if fully masked.",
        kind="I.full-as-partial-empty",
        reference="inferred from tokamax 620ac16",
        shows=_SHOWS,
        trigger=masked,
        kinds=lambda kinds, call: jnp.where(kinds == PARTIAL, EMPTY, kinds),
    ),
    _bug(
        name="block-diagonal-skipped-by-floor",
        says="The number of key blocks up to the diagonal is rounded down, not up.",
        kind="causal.ub-floor",
        reference="jax b8b9f2bc33",
        shows=_SHOWS,
        trigger=lambda case: mixed(case) and "causal" in case.mask,
        kinds=_without_floored_diagonal,
    ),
    _bug(
        name="block-window-start-rounded-up",
        says="The first key block of a window is rounded up, so a partly visible block is skipped.",
        kind="causal.ub-floor",
        reference="inferred from jax b8b9f2bc33",
        shows=_SHOWS,
        trigger=late_start,
        kinds=_without_ceiled_start,
    ),
    _bug(
        name="block-scan-stops-at-first-empty-tile",
        says="The loop over key blocks ends at the first fully masked tile.",
        kind="bwd.init-loop-empty",
        reference="inferred from tokamax bc7a732",
        shows=_SHOWS,
        trigger=late_start,
        kinds=_until_first_empty,
    ),
    _bug(
        name="block-holes-attended",
        says="Fully masked tiles between visible ones are computed without a mask.",
        kind="mask.no-partial-blocks",
        reference="inferred from tokamax 620ac16",
        shows=_SHOWS,
        trigger=lambda case: holes(case) or (case.segments is not None and case.kv_length > 512),
        kinds=_holes_attended,
    ),
    _bug(
        name="block-first-tile-unmasked",
        says="The first visible tile of each query block is computed without its mask.",
        kind="mask.dyngrid-pad0",
        reference="inferred from tokamax 9ddc1b0",
        shows=_SHOWS,
        trigger=masked,
        kinds=lambda kinds, call: jnp.where(_first_active(kinds), FULL, kinds),
    ),
    _bug(
        name="block-corner-tile-skipped",
        says="The tile of the first queries and the first keys is skipped.",
        kind="mask.dyngrid-pad0",
        reference="tokamax 9ddc1b0",
        shows=_SHOWS,
        trigger=several_blocks,
        kinds=lambda kinds, call: kinds.at[0, ..., 0].set(EMPTY),
    ),
    _bug(
        name="block-map-of-first-batch-row",
        says="The block map of the first batch row decides which tiles all batch rows visit.",
        kind="I.batch0-mask",
        reference="inferred from ejkernel 3ed3b1f",
        shows=_SHOWS,
        trigger=kinds_by_batch,
        kinds=lambda kinds, call: kinds[:, :1],
    ),
    _bug(
        name="block-mask-of-first-batch-row",
        says="The block map and the tile masks of the first batch row serve all batch rows.",
        kind="I.batch0-mask",
        reference="inferred from ejkernel 3ed3b1f",
        shows=_SHOWS,
        trigger=lambda case: by_batch(case) or (case.batch > 1 and case.segments is not None),
        classify=lambda tiles: classify(tiles[:, :1]),
        mask_tiles=lambda tiles, kinds, call: tiles[:, :1],
    ),
    _bug(
        name="block-map-of-first-head",
        says="The block map of the first head decides which tiles all heads visit.",
        kind="I.head0-mask",
        reference="inferred from torch-xpu-ops#5090",
        shows=_SHOWS,
        trigger=kinds_by_head,
        kinds=lambda kinds, call: kinds[:, :, :1, :1],
    ),
    _bug(
        name="block-mask-of-group-leader",
        says="All query heads of a group use the mask of its first head.",
        kind="perhead-mask-gqa",
        reference="torch-xpu-ops#5090",
        shows=_SHOWS,
        trigger=lambda case: by_head(case) and case.num_q_heads != case.num_kv_heads,
        classify=lambda tiles: classify(tiles[:, :, :, :1]),
        mask_tiles=lambda tiles, kinds, call: tiles[:, :, :, :1],
    ),
    _bug(
        name="block-mask-rows-in-key-blocks",
        says="Query block i takes the mask of rows from 64 i on, not from 32 i on.",
        kind="bwd.blocksize-conflate",
        reference="inferred from jax b8b9f2bc33",
        shows=_SHOWS,
        trigger=lambda case: masked(case) and case.q_length > BLOCK_Q,
        kinds=lambda kinds, call: _rows_in_key_blocks(kinds),
        mask_tiles=_in_key_blocks_of_empty,
    ),
    _bug(
        name="block-mask-columns-in-blocks",
        says="Key block j takes the mask of columns from j on, not from 64 j on.",
        kind="I.causal-colid",
        reference="inferred from jax f132527792",
        shows=_SHOWS,
        trigger=lambda case: masked(case) and several_blocks(case),
        classify=lambda tiles: classify(_columns_in_blocks(tiles)),
        mask_tiles=lambda tiles, kinds, call: _columns_in_blocks(tiles),
    ),
    _bug(
        name="block-mask-wraps-at-512",
        says="The mask offset of keys wraps at 512, so later keys use the first masks.",
        kind="int32.token-sharp",
        reference="inferred from fla#1080",
        shows=_SHOWS,
        trigger=lambda case: case.kv_length > 512 and case.mask != "full",
        classify=lambda tiles: classify(tiles[jnp.arange(tiles.shape[0]) % _WRAP]),
        mask_tiles=lambda tiles, kinds, call: tiles[jnp.arange(tiles.shape[0]) % _WRAP],
    ),
    _bug(
        name="block-visited-as-full-and-partial",
        says="Partly masked tiles are visited twice, so that their weights count double.",
        kind="flex.full-partial-order",
        reference="inferred from pytorch#182593",
        shows=_SHOWS,
        trigger=mixed,
        weights=_twice_if_partial,
    ),
    _bug(
        name="block-empty-tiles-enter-unmasked",
        says="Fully masked tiles are computed as if fully visible.",
        kind="ring.empty-block",
        reference="tokamax 657b71a",
        shows=_SHOWS,
        trigger=empty_tile,
        kinds=lambda kinds, call: jnp.where(kinds == EMPTY, FULL, kinds),
    ),
)
"""Bugs of the block map."""
