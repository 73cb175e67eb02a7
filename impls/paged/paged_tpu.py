"""Paged attention for TPUs in Pallas: a grid step per tile of queries, and pages that the kernel prefetches itself.

Tables, tiles and blocks lie in scalar memory, pages and results in HBM. A step of the grid is one tile of queries, all
of one sequence (`QueryTiles`): a part of a prompt or a single token. So the work grows with the actual queries and
keys, not with `max_seqs` and `pages_per_seq`. Block by block, a step updates m, l and the sum of a part, equations (1)
to (6) of `impls/__init__.py` without sink and division.

The kernel itself copies two things that a pipeline cannot copy (`impls.paged.page_copies`). The pages of a block may
lie anywhere. A tile may have fewer than `block_q` rows of results, and the rows after them belong to another sequence.

Heads of one group are rows of one product with the keys that they share. Rows are a tile's queries times the heads of
a group, `row = i * G + g`. A tile of one query, as in decoding, is computed with the rows of one query.

With latents all query heads form one group, and the first coordinates of a latent are its value. So a block of latents
serves as keys and as values where it was copied to, and is not split by head. A tile then has many rows, which are
computed `block_rows` at a time.

A page interleaves heads by token. In bf16, a row of 32-bit words holds two heads, and the words of one pair are loaded
where they lie (`impls.paged.page_copies.load_pair`). Other blocks are split by head first.

z and m are in units of log 2, and l is kept separately for each lane until the end, as in `impls.splash_tpu.forward`.
Between heads, the softmax is passed in values instead of references. No mask is applied where every query sees the
whole block. For a single query, the products of eight heads are issued before their softmax, and the copies of the next
block are started among them. A block of 512 keys then takes 1,011 cycles, with the start of 64 copies (compiler's
schedule on v5e, libtpu 0.0.50.1, depth 128, bf16, eight query heads for each of eight key/value heads). Products alone
keep the matrix units busy for 768 of them.

Masks over sequences (docs/contract.md, section 8) are applied in every block within the window, but a mask of trees
only from the keys of the queries on.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from impls.block_arithmetic import LN_2, make_shape, multiply_tiles
from impls.jax_compat import Interpret, Ref, Scalar
from impls.paged.page_copies import (
    LANES,
    NUM_BUFFERS,
    PageBlocks,
    PageCache,
    Results,
    build_blocks,
    build_starts,
    find_buffer,
    find_chip_room,
    find_pair_stride,
    holds_pairs,
    is_whole,
    load_pair,
    split_pairs,
    start_block,
    start_rows,
    take_head,
    wait_for_block,
    wait_for_rows,
)
from impls.paged.paged_plan import (
    Operands,
    PagedPlan,
    QueryTiles,
    build_tiles,
    compute_allowed,
    compute_changed_logits,
    compute_logits,
    find_key_range,
)
from impls.pallas_tpu.tpu_tiles import EMPTY_MAXIMUM, SUBLANES, make_column, repeat_lanes, round_up, sum_by_lane
from impls.softmax_merge import Part
from impls.varying_axes import find_varying_axes, mark_shapes_varying, mark_varying

TOGETHER = 32
"""Number of tokens whose heads are split at a time."""
HEADS = 4
"""Number of heads whose products are computed together, to hide latencies; twice as many for few rows."""
FEW_ROWS = 32
"""Rows of a unit up to which the logits of several units fit registers."""


class HeadRefs(NamedTuple):
    """Refs in VMEM, with heads as first axis."""

    q: Any  # [K, rows, H]
    out: Any  # [K, rows, V] f32, sum of weighted values, equation (6)
    max: Any  # [K, rows, LANES] f32, the maximum m in units of log 2
    sum: Any  # [K, rows, LANES] f32, whose lanes add up to the sum of weights l
    k: Any = None  # [K, block, H]; None for latents
    v: Any = None  # [K, block, V]; None for latents
    scales: Any = None  # [W, block] f32, scales of each head's keys, then of each head's values; None without scales


class ComputeUnits(NamedTuple):
    """Units of a block that are computed one after the other: heads, or groups of rows of a latent."""

    total: int
    rows: int  # rows of each unit
    place: Callable[[Any], tuple[Any, Any]]  # from a unit's number: its head and rows in the arrays of `HeadRefs`
    # From a unit's number, and whether that is odd: its keys [block, H].
    keys: Callable[[Any, int], jax.Array]
    values: Callable[[Any, int], jax.Array]  # likewise, its values [block, V]
    # `of_keys(number, x)` multiplies x by the scale of each key of a unit, along the last axis; `of_values` by the
    # scale of each value. Without scales both return x.
    of_keys: Callable[[Any, Any], Any] = lambda number, x: x
    of_values: Callable[[Any, Any], Any] = lambda number, x: x


class Tile(NamedTuple):
    """The tile of queries that a grid step computes."""

    number: Scalar
    queries: Scalar  # number of the tile's queries
    position: Scalar  # position of the first query in its sequence
    most: int  # largest number of queries per tile
    group: int  # query heads per key/value head
    keys: Any = None  # number of keys of its sequence; None if no query sees a key after its own position
    sequence: Any = None  # None without functions of places
    before: Any = None  # number of its sequence's keys before those of the queries; None without a mask of trees

    def sized(self, do: Callable[[int], None]) -> None:
        """Call `do` with the number of queries to compute: 1 for a single query, else the tile's size."""
        pl.when(self.queries == 1)(functools.partial(do, 1))
        if self.most > 1:
            pl.when(self.queries != 1)(functools.partial(do, self.most))

    def find_seen_keys(self, plan: PagedPlan) -> tuple[Any, Any]:
        """Find the first key that some query of the tile sees, and one past the last."""
        low, _ = find_key_range(plan, self.position, self.keys)
        _, high = find_key_range(plan, self.position + (self.queries - 1), self.keys)
        return low, high


class FurtherRefs(NamedTuple):
    """Refs of operands that only some calls have; None in other calls."""

    keys: Any = None  # SMEM [L], number of keys of each tile's sequence
    before: Any = None  # SMEM [L], how many of them lie before those of the queries
    # VMEM [block_q, columns] bf16, 1 where a query of the tile sees a key of its sequence, or that of a query.
    mask: Any = None
    tree_mask: Any = None
    # Of each query head, f32 `[K, p, LANES]`, the same in every lane. The rows of a tile repeat these p rows.
    logit_scale: Any = None
    alibi_slopes: Any = None


def compute_tile(
    plan: PagedPlan,
    tiles: QueryTiles,
    blocks: PageBlocks,
    q_ref: Ref,
    cache: PageCache,
    heads: HeadRefs,
    further: FurtherRefs,
    results: Results,
) -> None:
    """Compute the tile of this grid step, and start the copies for the next one."""
    number, num_kv_heads = pl.program_id(0), heads.q.shape[0]
    most, group = q_ref.shape[0], q_ref.shape[1] // num_kv_heads
    tile = Tile(number, tiles.queries[number], tiles.position[number], most, group)
    if further.keys is not None:
        tile = tile._replace(keys=further.keys[number])
    if further.before is not None:
        tile = tile._replace(before=further.before[number])
    if plan.mask_mod is not None or plan.score_mod is not None:
        tile = tile._replace(sequence=tiles.sequence[number])
    # The very first block of the call: no earlier tile could start its copy.
    opens = (blocks.length[number] > 0) & (blocks.before[number] == 0)
    pl.when(opens)(functools.partial(start_block, cache, tiles, blocks, number, jnp.int32(0)))

    def take(size: int) -> None:
        heads.q[:, : size * group] = _flatten_queries(q_ref[:size], num_kv_heads)

    # The products of a single query leave the scalar unit idle, which can start copies meanwhile.
    hides = _hides_places(plan, further)
    may_overlap = (
        cache.paired and not hides and num_kv_heads == _count_together(num_kv_heads, count_rows(plan, 1, group))
    )

    def overlaps(start: Scalar, next_tile: Scalar, next_block: Scalar) -> Any:
        low, high = find_key_range(plan, tile.position, tile.keys)
        sees_all = (tile.queries == 1) & (start >= low) & (start + cache.block <= high)
        known = jnp.minimum(next_tile, blocks.end.shape[0] - 1)
        return sees_all & (next_tile < tiles.total) & is_whole(cache, blocks, known, next_block)

    def with_block(block: Scalar, _: None) -> None:
        ends = block + 1 == blocks.length[number]
        # The next block is copied to the buffer of the previous block, which is no longer needed.
        next_tile = jnp.where(ends, blocks.following[number], number)
        next_block = jnp.where(ends, 0, block + 1)
        follows = next_tile < tiles.total
        start = (blocks.slot[number] + block * plan.block_pages) * cache.page_size
        buffer = find_buffer(blocks, number, block)

        overlapping = overlaps(start, next_tile, next_block) if may_overlap else None
        alone = follows if overlapping is None else follows & jnp.logical_not(overlapping)
        pl.when(alone)(functools.partial(start_block, cache, tiles, blocks, next_tile, next_block))
        wait_for_block(cache, tiles, blocks, number, block)
        if not cache.paired:
            take_block = _zero_unseen_latents if heads.k is None else _split_heads
            take_block(plan, tile, cache, heads, buffer, start)

        def add_and_copy() -> None:
            units = _list_units(plan, cache, heads, buffer, count_rows(plan, 1, group), None)
            start_pages = build_starts(cache, tiles, blocks, next_tile, next_block)
            logits = _build_logits(plan, tile, further, units, start, cache.block)
            _add_units(heads, units, cache.block, logits, start_pages)

        def add() -> None:
            tile.sized(functools.partial(_add_block, plan, tile, cache, heads, further, buffer, start))

        if overlapping is None:
            add()
        else:
            pl.when(overlapping)(add_and_copy)
            pl.when(jnp.logical_not(overlapping))(add)

    tile.sized(take)
    tile.sized(functools.partial(_clear, plan, tile, heads))
    lax.fori_loop(jnp.int32(0), blocks.length[number], with_block, None)
    # The rows of the previous tile must be written back before this tile reuses their buffer.
    pl.when(number > 0)(lambda: wait_for_rows(results, tiles, jnp.maximum(number - 1, 0)))
    tile.sized(functools.partial(_write_results, tile, heads, results))
    start_rows(results, tiles, number)
    pl.when(number == tiles.total - 1)(functools.partial(wait_for_rows, results, tiles, number))


def _hides_places(plan: PagedPlan, further: FurtherRefs) -> bool:
    """Check whether a mask may hide keys within the run of keys that a query sees."""
    return any(x is not None for x in (plan.mask_mod, further.mask, further.tree_mask))


def _clear(plan: PagedPlan, tile: Tile, heads: HeadRefs, size: int) -> None:
    """Initialise the online softmax of the rows of `size` queries, before any key."""
    rows = count_rows(plan, size, tile.group)
    for ref, value in ((heads.out, 0.0), (heads.max, EMPTY_MAXIMUM), (heads.sum, 0.0)):
        ref[:, :rows] = jnp.full((ref.shape[0], rows, ref.shape[2]), value, jnp.float32)


def count_rows(plan: PagedPlan, size: int, group: int) -> int:
    """Count the rows that are computed for `size` queries, including padding to registers and units."""
    rows, some = -(-size * group // SUBLANES) * SUBLANES, plan.block_rows
    return -(-rows // some) * some if 0 < some < rows else rows


def _split_heads(plan: PagedPlan, tile: Tile, cache: PageCache, heads: HeadRefs, buffer: Scalar, start: Scalar) -> None:
    """Split the keys and values of a block, beginning with key `start`, by head; pages interleave heads by token."""
    block = cache.block
    together = TOGETHER if block % TOGETHER == 0 else block
    low, high = tile.find_seen_keys(plan)

    def taken(clear: bool) -> None:
        def some(number: Scalar, _: None) -> None:
            at = pl.ds(pl.multiple_of(number * together, together), together)
            # Stored numbers with scales are exact in the dtype of q: int8 and fp8 have fewer bits than bf16.
            k, v = (_cast_like(held[buffer, at], heads.k.dtype) for held in cache.held[:2])  # [together, K, .]
            if clear:
                j = start + number * together + lax.broadcasted_iota(jnp.int32, v.shape, 0)
                v = jnp.where((j >= low) & (j < high), v.astype(jnp.float32), 0.0).astype(v.dtype)
            heads.k[:, at], heads.v[:, at] = k.swapaxes(0, 1), v.swapaxes(0, 1)

        lax.fori_loop(jnp.int32(0), jnp.int32(block // together), some, None)

    if heads.scales is not None:
        _transpose_scales(cache, heads, buffer, start, (low, high))
    # Values that no query sees may be NaN, and 0 * NaN is not 0. They include pages that were not copied.
    seen = (start >= low) & (start + block <= high)
    pl.when(seen)(functools.partial(taken, clear=False))
    pl.when(jnp.logical_not(seen))(functools.partial(taken, clear=True))


def _cast_like(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else x.astype(jnp.float32).astype(dtype)


def _transpose_scales(cache: PageCache, heads: HeadRefs, buffer: Scalar, start: Scalar, seen: tuple[Any, Any]) -> None:
    """Transpose the scales of a block, so that tokens are lanes as in logits and weights."""
    scales = cache.held[2][buffer].reshape(cache.block, -1).T  # [W, block]
    j = start + lax.broadcasted_iota(jnp.int32, scales.shape, 1)
    heads.scales[...] = jnp.where((j >= seen[0]) & (j < seen[1]), scales, 0.0)


def _zero_unseen_latents(
    plan: PagedPlan, tile: Tile, cache: PageCache, heads: HeadRefs, buffer: Scalar, start: Scalar
) -> None:
    """Zero the latents of a block that no query sees, in place."""
    del heads
    (held,) = cache.held
    size = cache.page_size
    low, high = tile.find_seen_keys(plan)

    @pl.when((start < low) | (start + cache.block > high))
    def cleared() -> None:
        def page(number: Scalar, _: None) -> None:
            latent = held[buffer, number]  # [page_size, H]
            j = start + number * size + lax.broadcasted_iota(jnp.int32, latent.shape, 0)
            seen = (j >= low) & (j < high)
            held[buffer, number] = jnp.where(seen, latent.astype(jnp.float32), 0.0).astype(latent.dtype)

        lax.fori_loop(jnp.int32(0), jnp.int32(cache.block_pages), page, None)


def _list_units(
    plan: PagedPlan, cache: PageCache, heads: HeadRefs, buffer: Scalar, rows: int, seen: Callable[[Any], Any] | None
) -> ComputeUnits:
    """List the units of a block: its heads, or groups of rows of a tile of latents.

    Args:
      seen: whether some query sees the key with an index in the block; None if every query sees all keys.
    """
    total = heads.q.shape[0]
    if cache.paired:

        def keys(h: Any, odd: int) -> jax.Array:
            return take_head(load_pair(cache, 0, buffer, h // 2), odd)

        def values(h: Any, odd: int) -> jax.Array:
            pair = load_pair(cache, 1, buffer, h // 2)
            if seen is not None:
                # Values that no query sees may be NaN, and 0 * NaN is not 0.
                pair = jnp.where(seen(lax.broadcasted_iota(jnp.int32, pair.shape, 0)), pair, jnp.uint32(0))
            return take_head(pair, odd)

        return ComputeUnits(total, rows, lambda h: (h, slice(rows)), keys, values)
    if heads.k is not None:
        units = ComputeUnits(
            total, rows, lambda h: (h, slice(rows)), lambda h, odd: heads.k[h], lambda h, odd: heads.v[h]
        )
        if heads.scales is None:
            return units
        return units._replace(
            of_keys=lambda h, x: x * heads.scales[pl.ds(h, 1), :],
            of_values=lambda h, x: x * heads.scales[pl.ds(total + h, 1), :],
        )
    some = min(rows, plan.block_rows)

    def latents(number: Scalar, odd: int) -> jax.Array:
        del number, odd
        return cache.held[0][buffer].reshape(cache.block, -1)

    def values_of_latents(number: Scalar, odd: int) -> jax.Array:
        k = latents(number, odd)
        return k[:, : plan.value_dim]

    def place(number: Scalar) -> tuple[Any, Any]:
        return 0, pl.ds(pl.multiple_of(number * some, some), some)

    return ComputeUnits(rows // some, some, place, latents, values_of_latents)


def _locate(tile: Tile, start: Scalar, shape: tuple[int, int], first: Scalar = 0) -> tuple[Any, Any]:
    """Locate rows from `first` and keys from `start` on: the position of each pair's query and of its key."""
    # Padding rows see the same keys as the tile's last query.
    i = (first + lax.broadcasted_iota(jnp.int32, shape, 0)) // jnp.int32(tile.group)
    j = start + lax.broadcasted_iota(jnp.int32, shape, 1)
    return tile.position + jnp.minimum(i, tile.queries - 1), j


def _find_heads(tile: Tile, number: Scalar, shape: tuple[int, ...]) -> Any:
    """Find the query head of each row of key/value head `number`."""
    return number * tile.group + lax.rem(lax.broadcasted_iota(jnp.int32, shape, 0), jnp.int32(tile.group))


def _build_logits(
    plan: PagedPlan, tile: Tile, further: FurtherRefs, units: ComputeUnits, start: Scalar, block: int
) -> Callable[[Any, jax.Array], jax.Array]:
    """Build the function that computes the logits of a unit, in units of log 2, from its number and its products."""
    of_heads = (further.logit_scale, further.alibi_slopes)
    if plan.score_mod is None and all(ref is None for ref in of_heads):
        return lambda number, x: compute_logits(plan, x, LN_2, functools.partial(units.of_keys, number))
    shape = (units.rows, block)
    i, j = _locate(tile, start, shape)

    def logits(number: Any, products: jax.Array) -> jax.Array:
        factor, slopes = (None if ref is None else _repeat_heads(ref[number], shape) for ref in of_heads)
        return compute_changed_logits(
            plan,
            products,
            lambda: (tile.sequence, _find_heads(tile, number, shape), i, j),
            factor=factor,
            slopes=slopes,
            unit=LN_2,
            of_keys=functools.partial(units.of_keys, number),
        )

    return logits


def _repeat_heads(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Repeat the numbers of a group's heads, `[p, LANES]`, to `shape`."""
    rows, block = shape
    return repeat_lanes(jnp.concatenate([x] * -(-rows // len(x)))[:rows], block)


def _add_block(
    plan: PagedPlan,
    tile: Tile,
    cache: PageCache,
    heads: HeadRefs,
    further: FurtherRefs,
    buffer: Scalar,
    start: Scalar,
    size: int,
) -> None:
    """Add the keys of one block, beginning with key `start`, to the online softmax of `size` queries."""
    rows, block = count_rows(plan, size, tile.group), cache.block
    list_units = functools.partial(_list_units, plan, cache, heads, buffer, rows)
    units = list_units(None)
    shape = (units.rows, block)
    build_logits = functools.partial(_build_logits, plan, tile, further, units, start, block)

    def sees(first: Scalar) -> jax.Array:
        return compute_allowed(plan, *_locate(tile, start, shape, first), tile.keys)

    def seen_in_part() -> None:
        logits = build_logits()
        of_all = sees(0) if units.rows == rows else None
        if further.mask is not None or further.tree_mask is not None:
            assert of_all is not None  # latents have no such masks
            of_all = of_all & _look_up_masks(tile, further, start, size, shape)

        def masked(number: Scalar, products: jax.Array) -> jax.Array:
            z = logits(number, products)
            allowed = sees(number * units.rows) if of_all is None else of_all
            if plan.mask_mod is not None:
                allowed = allowed & _call_mask(plan, tile, number, *_locate(tile, start, shape))
            return jnp.where(allowed, z, -jnp.inf)  # equation (3)

        of_tile = list_units(lambda j: (start + j >= first) & (start + j < end))
        _add_units(heads, of_tile, block, masked, hides=_hides_places(plan, further))

    first, end = tile.find_seen_keys(plan)
    if plan.mask_mod is not None or further.mask is not None:
        seen_in_part()
        return
    low, _ = find_key_range(plan, tile.position + (tile.queries - 1), tile.keys)
    _, high = find_key_range(plan, tile.position, tile.keys)
    seen = (start >= low) & (start + block <= high)  # whether every query sees the whole block
    if further.tree_mask is not None:
        seen = seen & (start + block <= tile.before)
    pl.when(seen)(lambda: _add_units(heads, units, block, build_logits()))
    pl.when(jnp.logical_not(seen))(seen_in_part)


def _look_up_masks(tile: Tile, further: FurtherRefs, start: Scalar, size: int, shape: tuple[int, int]) -> jax.Array:
    """Look up which keys of a block the rows of a tile see by the masks that are arrays.

    Two products with zeros and ones select numbers: keys of the block from columns, and the query of each row.
    """
    rows, block = shape
    masks = ((further.mask, jnp.int32(0)), (further.tree_mask, tile.before))
    found = [_select_columns(ref, size, start - first, block) for ref, first in masks if ref is not None]
    sees = functools.reduce(operator.mul, found)  # [size, block]
    if size == 1:
        return jnp.broadcast_to(sees, shape) > 0.5
    query = jnp.minimum(lax.broadcasted_iota(jnp.int32, (rows, size), 0) // jnp.int32(tile.group), tile.queries - 1)
    of_row = lax.broadcasted_iota(jnp.int32, (rows, size), 1) == query
    return multiply_tiles(_count_true(of_row), sees.astype(jnp.bfloat16), (1, 0)) > 0.5


def _select_columns(ref: Ref, size: int, start: Scalar, block: int) -> jax.Array:
    """Select columns `start` to `start + block` of `size` rows, f32; 1 for columns before the first."""
    columns = ref.shape[1]
    width = min(columns, round_up(block, LANES) + LANES)
    # Loads begin at whole registers, columns do not.
    at = pl.multiple_of(jnp.clip(start // LANES * LANES, 0, columns - width), LANES)
    column = start + lax.broadcasted_iota(jnp.int32, (width, block), 1)
    is_chosen = lax.broadcasted_iota(jnp.int32, (width, block), 0) + at == column
    found = multiply_tiles(ref[:size, pl.ds(at, width)], _count_true(is_chosen), (1, 0))
    return jnp.where(start + lax.broadcasted_iota(jnp.int32, found.shape, 1) < 0, 1.0, found)


def _count_true(x: jax.Array) -> jax.Array:
    """Convert booleans to zeros and ones, which products in bf16 add up exactly."""
    return jnp.where(x, 1.0, 0.0).astype(jnp.bfloat16)


def _call_mask(plan: PagedPlan, tile: Tile, number: Scalar, i: jax.Array, j: jax.Array) -> jax.Array:
    """Call `mask_mod` for the rows at positions `i` of key/value head `number` and the keys `j`."""
    assert plan.mask_mod is not None
    found = jnp.asarray(plan.mask_mod(tile.sequence, _find_heads(tile, number, i.shape), i, j))
    # Booleans that differ by sequence alone are no vector, and only numbers can be made one.
    return found if found.shape == i.shape else jnp.broadcast_to(found.astype(jnp.int32), i.shape) != 0


def _count_together(units: int, rows: int) -> int:
    """Count the units that are computed together; it divides the number of all units."""
    most = 2 * HEADS if rows <= FEW_ROWS else HEADS
    return next(some for some in (most, HEADS, 2, 1) if units % some == 0)


def _add_units(
    heads: HeadRefs,
    units: ComputeUnits,
    block: int,
    logits: Callable[[Any, jax.Array], jax.Array],
    start_pages: Callable[[int, int], None] = lambda number, of: None,
    *,
    hides: bool = False,
) -> None:
    """Add a block unit by unit. The products of each unit are issued before the softmax of the previous unit.

    If units have few rows, the products of all units that are computed together are issued first.

    Args:
      logits: function of a unit's number and its products that computes logits in units of log 2, -inf where a query
        does not see a key.
      hides: whether no row of a unit may see a key that the tile sees.
      start_pages: function that starts a part of the copies of the next block: part `number` of `of` parts. It needs
        all units to be computed together.
    """
    depth_v = heads.out.shape[2]
    several = _count_together(units.total, units.rows)
    ahead = several if units.rows <= FEW_ROWS else 1

    def products_of(number: Scalar, n: int) -> jax.Array:
        return multiply_tiles(heads.q[units.place(number)], units.keys(number, n % 2), (1, 1))  # [rows, block]

    def scale_weights(number: Scalar, weights: jax.Array, z: jax.Array) -> jax.Array:
        scaled = units.of_values(number, weights)
        if not hides or heads.scales is None:
            return scaled
        return jnp.where(z == -jnp.inf, 0.0, scaled)  # scales of hidden keys may be NaN

    def of_units(number: Scalar, _: None) -> None:
        these = [number * several + n for n in range(several)]
        # Values, not references, between units: the compiler does not reorder stores and loads.
        softmax = [tuple(ref[units.place(this)] for ref in (heads.max, heads.sum, heads.out)) for this in these]
        coming = [products_of(this, n) for n, this in enumerate(these[:ahead])]
        for n, this in enumerate(these):
            start_pages(n, several)
            products, (before, total, acc) = coming[n], softmax[n]  # [rows, block]; [rows, LANES] twice, [rows, V]
            if n + ahead < several:
                coming.append(products_of(these[n + ahead], n + ahead))
            z = logits(this, products)  # equations (1) to (3)  # [rows, block]
            top = jnp.maximum(before, z.max(axis=-1, keepdims=True))  # maximum, equation (4)
            weights, decay = jnp.exp2(z - repeat_lanes(top, block)), jnp.exp2(before - top)
            values = units.values(this, n % 2)  # [block, V]
            if hides:
                values = _zero_hidden(values, z)
            acc = acc * repeat_lanes(decay, depth_v) + multiply_tiles(
                scale_weights(this, weights, z).astype(values.dtype), values, (1, 0)
            )  # weighted sum of values, equation (6)
            softmax[n] = top, total * decay + sum_by_lane(weights), acc  # sum of weights, equation (5)
        for this, found in zip(these, softmax, strict=True):
            place = units.place(this)
            heads.max[place], heads.sum[place], heads.out[place] = found

    lax.fori_loop(jnp.int32(0), jnp.int32(units.total // several), of_units, None)


def _zero_hidden(values: jax.Array, z: jax.Array) -> jax.Array:
    """Zero the values `[block, V]` of keys that no row sees: they may be NaN, and 0 * NaN is not 0.

    Each key/value head has its own, since a mask may hide a key from the query heads of one of them alone.
    """
    largest = make_column(z.max(axis=0, keepdims=True))  # [block, LANES]
    is_hidden = repeat_lanes(largest, values.shape[1]) == -jnp.inf
    return jnp.where(is_hidden, 0.0, values.astype(jnp.float32)).astype(values.dtype)


def _write_results(tile: Tile, heads: HeadRefs, results: Results, size: int) -> None:
    """Write the part of `size` queries. The second array has `max` in the first lane and `sum` in the others."""
    rows = size * tile.group
    top, total = heads.max[:, :rows], heads.sum[:, :rows].sum(axis=-1, keepdims=True)
    top = jnp.where(top == EMPTY_MAXIMUM, -jnp.inf, top * jnp.float32(LN_2))
    statistics = jnp.where(lax.broadcasted_iota(jnp.int32, top.shape, 2) == 0, top, total)
    for given, x in zip(results.tile, (heads.out[:, :rows], statistics), strict=True):
        given[:size] = _restore_queries(x, size)


def _flatten_queries(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """Flatten queries `[T, N, H]` to rows `[K, T * G, H]`."""
    queries, heads, depth = q.shape
    grouped = q.reshape(queries, num_kv_heads, heads // num_kv_heads, depth)
    return grouped.transpose(1, 0, 2, 3).reshape(num_kv_heads, -1, depth)


def _restore_queries(x: jax.Array, queries: int) -> jax.Array:
    """Invert `_flatten_queries`: `[K, T * G, .]` to `[T, N, .]`."""
    num_kv_heads, rows, width = x.shape
    split = x.reshape(num_kv_heads, queries, rows // queries, width)
    return split.transpose(1, 0, 2, 3).reshape(queries, -1, width)


def attend(plan: PagedPlan, operands: Operands, *, interpret: Interpret) -> Part:
    """Attend to every key that each query sees; the part `[total_q, N, .]` is empty past the last sequence."""
    total, heads, depth = operands.q.shape
    depth_v = _get_value_depth(plan, operands)
    tiles = build_tiles(operands, plan.block_q)
    blocks = build_blocks(plan, operands, tiles)
    # Padded for a tile that begins with the last query.
    q = jnp.pad(operands.q, ((0, plan.block_q), (0, 0), (0, 0)))
    lists, blocked = _build_lists(plan, operands, tiles), _build_blocked(plan, operands, tiles)
    scalars = (operands.page_indices.reshape(-1), *tiles[1:], *blocks, *lists.values())
    pages = _list_pages(operands)
    arrays = (q, *pages, *blocked.values())
    scalars, arrays = mark_varying((scalars, arrays), find_varying_axes((scalars, arrays)))
    kernel = functools.partial(
        _kernel, plan, operands.page_indices.shape[1], len(pages), interpret, tuple(lists), tuple(blocked)
    )
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    of_tile = tuple(pl.Element(size) for size in (plan.block_q, heads, depth))
    out, statistics = pl.pallas_call(
        kernel,
        out_shape=mark_shapes_varying(
            [make_shape((total, heads, width), jnp.float32) for width in (depth_v, LANES)], arrays[0]
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(tiles.total,),
            in_specs=[
                pl.BlockSpec(of_tile, lambda tile, table, sequence, row, *_: (row[tile], 0, 0)),
                *[anywhere] * len(pages),
                *(
                    pl.BlockSpec((None, *x.shape[1:]), lambda tile, *_: (tile, 0, 0))
                    if name in _MASKS
                    else pl.BlockSpec(x.shape, lambda tile, *_: (0, 0, 0))
                    for name, x in blocked.items()
                ),
            ],
            out_specs=[anywhere] * 2,
            scratch_shapes=_build_scratch(plan, operands),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=find_chip_room().vmem,
            # Checks of every copy would take 24 cycles instead of 5 to start one. Interpreters still check bounds.
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="paged_attention",
    )(*scalars, *arrays)
    there = (jnp.arange(total, dtype=jnp.int32) < operands.cu_q_lens[operands.num_seqs[0]])[:, None, None]
    return Part(
        out=jnp.where(there, out, 0.0),
        max=jnp.where(there, statistics[..., :1], -jnp.inf),
        sum=jnp.where(there, statistics[..., 1:2], 0.0),
    )


_MASKS = ("mask", "tree_mask")


def _build_lists(plan: PagedPlan, operands: Operands, tiles: QueryTiles) -> dict[str, jax.Array]:
    """Build the lists of `FurtherRefs` in scalar memory that the call needs, by name."""
    found = {} if plan.right == 0 else {"keys": operands.kv_lens[tiles.sequence]}
    if operands.tree_mask is not None:
        found["before"] = (operands.kv_lens - jnp.diff(operands.cu_q_lens))[tiles.sequence]
    return found


def _build_blocked(plan: PagedPlan, operands: Operands, tiles: QueryTiles) -> dict[str, jax.Array]:
    """Build the arrays of `FurtherRefs` in VMEM that the call needs, by name."""
    group = operands.q.shape[1] // operands.k_pages.shape[2]
    masks = {name: x for name in _MASKS if (x := getattr(operands, name)) is not None}
    of_heads = {"logit_scale": operands.logit_scale, "alibi_slopes": operands.alibi_slopes}
    return {
        **{name: _gather_tile_rows(x, tiles, plan.block_q) for name, x in masks.items()},
        **{name: _build_head_rows(x, group) for name, x in of_heads.items() if x is not None},
    }


def _gather_tile_rows(mask: jax.Array, tiles: QueryTiles, block_q: int) -> jax.Array:
    """Gather the rows of each tile's queries, `[L, block_q, columns]` bf16, with whole lanes of columns."""
    columns = mask.shape[1]
    padded = jnp.pad(mask, ((0, 0), (0, round_up(columns, LANES) - columns))).astype(jnp.bfloat16)
    return padded.at[tiles.row[:, None] + jnp.arange(block_q, dtype=jnp.int32)].get(mode="clip")


def _build_head_rows(x: jax.Array, group: int) -> jax.Array:
    """Repeat numbers of query heads `[N]` until the heads of a group fill whole registers, `[K, p, LANES]`."""
    rows = jnp.tile(x.astype(jnp.float32).reshape(-1, group), (1, math.lcm(group, SUBLANES) // group))
    return jnp.broadcast_to(rows[..., None], (*rows.shape, LANES))


def _get_value_depth(plan: PagedPlan, operands: Operands) -> int:
    if operands.v_pages is not None:
        return int(operands.v_pages.shape[3])
    assert plan.value_dim is not None
    return plan.value_dim


def _list_pages(operands: Operands) -> tuple[jax.Array, ...]:
    """List the arrays that are copied page by page. Latents lose the axis of heads, so that tokens fill tiles."""
    if operands.v_pages is None:
        return (operands.k_pages[:, :, 0],)
    if holds_pairs(operands):
        return split_pairs(operands.k_pages), split_pairs(operands.v_pages)
    scales = () if operands.page_scales is None else (operands.page_scales,)
    return operands.k_pages, operands.v_pages, *scales


def _build_scratch(plan: PagedPlan, operands: Operands) -> list[Any]:
    """Build the scratch memory of the kernel, in the order of `_kernel`."""
    _, heads, depth = operands.q.shape
    _, page_size, num_kv_heads, _ = operands.k_pages.shape
    dtype = operands.q.dtype
    rows = count_rows(plan, plan.block_q, heads // num_kv_heads)
    block = plan.block_pages * page_size
    depth_v = _get_value_depth(plan, operands)
    if operands.v_pages is None:
        held = [pltpu.VMEM((NUM_BUFFERS, plan.block_pages, page_size, depth), dtype)]
        scratch: list[Any] = []
    elif holds_pairs(operands):
        stride = find_pair_stride(num_kv_heads)
        held = [pltpu.VMEM((NUM_BUFFERS, block, stride, 2, width), dtype) for width in (depth, depth_v)]
        scratch = []
    else:
        stored = operands.k_pages.dtype
        held = [pltpu.VMEM((NUM_BUFFERS, block, num_kv_heads, width), stored) for width in (depth, depth_v)]
        scratch = [pltpu.VMEM((num_kv_heads, block, width), dtype) for width in (depth, depth_v)]
    if operands.page_scales is not None:
        lanes = operands.page_scales.shape[2]
        held.append(pltpu.VMEM((NUM_BUFFERS, plan.block_pages, page_size, lanes), jnp.float32))
        scratch.append(pltpu.VMEM((lanes, block), jnp.float32))
    return [
        *held,
        pltpu.SemaphoreType.DMA((len(held), NUM_BUFFERS)),
        pltpu.VMEM((num_kv_heads, rows, depth), dtype),
        *(pltpu.VMEM((num_kv_heads, rows, width), jnp.float32) for width in (depth_v, LANES, LANES)),
        *scratch,
        *(pltpu.VMEM((plan.block_q, heads, width), jnp.float32) for width in (depth_v, LANES)),
        pltpu.SemaphoreType.DMA((2,)),
    ]


def _kernel(
    plan: PagedPlan,
    pages_per_seq: int,
    copied: int,
    interpret: Interpret,
    lists: tuple[str, ...],
    blocked: tuple[str, ...],
    page_indices: Any,
    *refs: Ref,
) -> None:
    num_lists = _NUM_TILE_LISTS + _NUM_BLOCK_LISTS + len(lists)
    scalars, (q, *arrays) = refs[:num_lists], refs[num_lists:]
    pages, arrays = arrays[:copied], arrays[copied:]
    further = dict(zip((*lists, *blocked), (*scalars[num_lists - len(lists) :], *arrays[: len(blocked)]), strict=True))
    out, statistics, *scratch = arrays[len(blocked) :]
    held, (arrived, *heads, tile_out, tile_statistics, written) = scratch[:copied], scratch[copied:]
    steps: Any = pl.num_programs(0)
    compute_tile(
        plan,
        QueryTiles(steps, *scalars[:_NUM_TILE_LISTS]),
        PageBlocks(*scalars[_NUM_TILE_LISTS : _NUM_TILE_LISTS + _NUM_BLOCK_LISTS]),
        q,
        PageCache(
            page_indices,
            tuple(pages),
            tuple(held),
            arrived,
            pages_per_seq,
            plan.block_pages,
            reshapes=isinstance(interpret, bool),
        ),
        HeadRefs(*heads),
        FurtherRefs(**further),
        Results((tile_out, tile_statistics), (out, statistics), written),
    )


_NUM_TILE_LISTS = len(QueryTiles._fields) - 1
_NUM_BLOCK_LISTS = len(PageBlocks._fields)
