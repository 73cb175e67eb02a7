"""Paged attention for GPUs in Pallas: one program per share of a tile's keys, and one that merges shares.

A program owns a tile of queries, all of one sequence (`impls.paged.paged_plan`), for the heads of one key/value head,
and a share of the blocks of keys that they see (`KeyShares`). It looks up the page of each key in the
table and reads the key in place. So nothing of the cache is copied, and the work grows with the queries and the keys.

A program computes equations (1) to (6) of `impls/__init__.py` over the keys of its share, without sink and division.

These are kernels in Triton. For Hopper, `impls.pallas_gpu.mosaic_decode` has another kernel with the same results.

A second kernel merges the parts of a tile in the order of their keys, so that every call gives the same bits. It writes
each row to its place in the results.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from impls.block_arithmetic import compute_exp, make_shape, multiply_tiles, replace_neg_inf
from impls.jax_compat import Interpret, Ref, Scalar, build_triton_call, count_multiprocessors
from impls.paged.paged_plan import (
    Operands,
    PagedPlan,
    QueryTiles,
    build_tiles,
    compute_allowed,
    compute_changed_logits,
    find_block_range,
    find_key_range,
)
from impls.pallas_gpu.mosaic_decode import DecodeShape, Shares, VisibleKeys, attend_to_shares, count_slots
from impls.pallas_gpu.mosaic_tiles import ROWS
from impls.pallas_gpu.triton_tiles import MIN_TILE, compute_positions, round_up_to_tile
from impls.softmax_merge import Part
from impls.varying_axes import find_varying_axes, mark_varying


class KeyShares(NamedTuple):
    """Division of the key blocks of a call between programs; int32. Entries past the last share have no block.

    A call may have tiles of long sequences, with many blocks of keys, and tiles of short ones. So a share is a fixed
    number of blocks of one tile; the number follows from the total of all blocks. A program computes one share, whether
    its tile is a part of a prompt or a single token over a long cache. Sharing one query's keys between programs
    follows Dao, Haziza, Massa and Sizov 2023, "Flash-Decoding".
    """

    tile: jax.Array  # [W], tile that the share belongs to
    first: jax.Array  # [W], index of the share's first block in its sequence
    end: jax.Array  # [W], one past the share's last block
    before: jax.Array  # [L], number of shares of all earlier tiles
    own: jax.Array  # [L], number of the tile's shares; 0 if its queries see no key


def build_shares(plan: PagedPlan, tiles: QueryTiles, keys: jax.Array, *, block: int, programs: int) -> KeyShares:
    """Build the shares of a call with blocks of `block` keys: about `programs`, plus at most one per tile.

    Args:
      keys: int32 `[L]`, number of keys of each tile's sequence.
    """
    number = jnp.arange(len(tiles.row), dtype=jnp.int32)
    first, end = find_block_range(plan, tiles.position, tiles.queries, block, keys)
    first = jnp.broadcast_to(first, number.shape)
    blocks = jnp.where(number < tiles.total, jnp.maximum(end - first, 0), 0)
    size = jnp.maximum((blocks.sum(dtype=jnp.int32) + (programs - 1)) // programs, 1)
    count = (blocks + (size - 1)) // size
    ends = jnp.cumsum(count, dtype=jnp.int32)
    share = jnp.arange(len(number) + programs, dtype=jnp.int32)
    tile = jnp.minimum(jnp.searchsorted(ends, share, side="right", method="scan_unrolled"), len(number) - 1).astype(
        jnp.int32
    )
    begin = first[tile] + (share - (ends - count)[tile]) * size
    return KeyShares(
        tile=tile,
        first=begin.astype(jnp.int32),
        end=jnp.where(share < ends[-1], jnp.minimum(begin + size, end[tile]), begin).astype(jnp.int32),
        before=ends - count,
        own=count,
    )


MAX_ROWS = 64
"""Largest number of rows per tile, so that the accumulator stays in registers. Further heads get further programs."""

MOSAIC_MIN_ROWS = 8
"""Least number of rows per tile of the Mosaic GPU kernel, the rows of a group of its shared memory."""

# Two programs for each multiprocessor of GPUs that have 108 to 148 of them.
_NUM_PROGRAMS = 256

# Operands that only some calls have.
_FURTHER = ("mask", "tree_mask", "alibi_slopes", "logit_scale")
_SCALES = ("k_scales", "v_scales")
Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Launch:
    """Sizes of a call. A column is a set of query heads of one key/value head: all of its group, or a part of it."""

    plan: PagedPlan
    block: int  # keys per block
    rows: int  # rows per tile
    heads: int  # query heads per column
    num_q_heads: int
    num_kv_heads: int
    page_size: int
    pages_per_seq: int
    depth: int
    v_depth: int

    @property
    def group(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def parts(self) -> int:
        """Columns per key/value head."""
        return -(-self.group // self.heads)

    @property
    def columns(self) -> int:
        return self.num_kv_heads * self.parts

    def place(self, column: Scalar) -> tuple[Any, Any]:
        """Compute the key/value head of a column, and the column's part of its group."""
        return lax.div(column, jnp.int32(self.parts)), lax.rem(column, jnp.int32(self.parts))


class _Rows(NamedTuple):
    """The rows of a tile in one column, `[rows]`: the heads of the first query, then those of the next."""

    query: jax.Array  # index of the row's query in the tile
    there: jax.Array  # whether the row's query and head exist
    packed: jax.Array  # index of the row in an array `[total_q * N, .]`; all indices differ
    head: jax.Array  # query head


def choose_block_q(total_q: int, num_seqs: int, group: int) -> int:
    """Choose the default queries per tile: as many as fill its rows, or one if every sequence has one query."""
    return 1 if total_q <= num_seqs else max(1, MAX_ROWS // group)


def attend(plan: PagedPlan, operands: Operands, *, interpret: Interpret, mosaic: bool = False) -> Part:
    """Attend to every key that each query sees; the part `[total_q, N, .]` is empty past the last sequence.

    `mosaic` selects the Mosaic GPU kernel for the shares; Triton merges them in any case.
    """
    assert operands.v_pages is not None  # there is no GPU kernel for latents
    launch = _build_launch(plan, operands, operands.v_pages.shape[3], mosaic=mosaic)
    total, heads = operands.q.shape[:2]
    tiles = build_tiles(operands, plan.block_q)
    programs = plan.programs
    if programs is None:
        programs = _count_mosaic_programs(launch, operands) if mosaic else -(-_NUM_PROGRAMS // launch.columns)
    keys = operands.kv_lens[tiles.sequence]
    shares = build_shares(plan, tiles, keys, block=launch.block, programs=programs)
    real = jnp.arange(len(tiles.row), dtype=jnp.int32) < tiles.total
    tiles = tiles._replace(queries=jnp.where(real, tiles.queries, 0))
    arrays: Arrays = {name: x for name, x in {**tiles._asdict(), **shares._asdict()}.items() if name != "total"}
    arrays |= {
        "keys": keys,
        "queries_in_all": operands.cu_q_lens[tiles.sequence + 1] - operands.cu_q_lens[tiles.sequence],
    }
    # `shard_map` checks over which mesh axes arrays vary: outputs must name the operands' axes.
    varying = find_varying_axes(operands)
    arrays = mark_varying(arrays, varying)
    attend_to_shares = _attend_with_mosaic if mosaic else _attend_with_triton
    found = attend_to_shares(launch, mark_varying(operands, varying), arrays, interpret)
    lists = {name: arrays[name] for name in ("row", "queries", "before", "own")}
    merged = _call_kernel(
        launch, _merge_kernel, "paged_merge", {**lists, **found}, len(tiles.row), total * heads, bool(interpret)
    )
    real_rows = (jnp.arange(total, dtype=jnp.int32) < operands.cu_q_lens[operands.num_seqs[0]])[:, None, None]
    return Part(
        out=jnp.where(real_rows, merged["out"].reshape(total, heads, -1), 0.0),
        max=jnp.where(real_rows, merged["max"].reshape(total, heads, 1), -jnp.inf),
        sum=jnp.where(real_rows, merged["sum"].reshape(total, heads, 1), 0.0),
    )


def _count_mosaic_programs(launch: _Launch, operands: Operands) -> int:
    """Count the programs per column of the Mosaic GPU kernel that fill the GPU."""
    _, together = count_slots(launch.depth, launch.v_depth, operands.k_pages.dtype)
    return max(1, count_multiprocessors() * together // launch.columns)


def _attend_with_triton(launch: _Launch, operands: Operands, arrays: Arrays, interpret: Interpret) -> Arrays:
    """Compute the part of each share; the rows of shares and columns are contiguous."""
    assert operands.v_pages is not None
    inputs: Arrays = {
        **arrays,
        "page_indices": operands.page_indices.reshape(-1),
        "q": operands.q.reshape(-1, launch.depth),
        "k": operands.k_pages.reshape(-1, launch.depth),
        "v": operands.v_pages.reshape(-1, launch.v_depth),
        **{name: x for name in _FURTHER if (x := getattr(operands, name)) is not None},
        **{name: x.reshape(-1) for name in _SCALES if (x := getattr(operands, name)) is not None},
    }
    longest = len(arrays["tile"])
    rows = longest * launch.columns * launch.rows
    return _call_kernel(launch, _share_kernel, "paged_shares", inputs, longest, rows, bool(interpret))


def _attend_with_mosaic(launch: _Launch, operands: Operands, arrays: Arrays, interpret: Interpret) -> Arrays:
    """Compute the same parts as `_attend_with_triton`. The parts of empty shares are not written."""
    assert operands.v_pages is not None
    plan, rows = launch.plan, jnp.arange(ROWS, dtype=jnp.int32)
    # A row of padding sees the same keys as the tile's last query.
    last = jnp.maximum(arrays["queries"], 1)[:, None] - 1
    position = arrays["position"][:, None] + jnp.minimum(rows[None, :] // launch.heads, last)
    low, high = find_key_range(plan, position)
    found = attend_to_shares(
        DecodeShape(
            head_dim=launch.depth,
            v_head_dim=launch.v_depth,
            rows=launch.rows,
            columns=launch.columns,
            columns_per_head=launch.parts,
            page_size=launch.page_size,
            dtype=operands.q.dtype,
            stored_dtype=operands.k_pages.dtype,
            scale=plan.scale,
            soft_cap=plan.soft_cap,
            interpret=interpret,
        ),
        _gather_queries(launch, operands.q, arrays),
        operands.k_pages,
        operands.v_pages,
        operands.page_indices,
        arrays["sequence"],
        Shares(*(arrays[name] for name in Shares._fields)),
        VisibleKeys(jnp.broadcast_to(jnp.int32(low), high.shape), high),
    )
    return {"out": found.out.reshape(-1, launch.v_depth), "max": found.max.reshape(-1), "sum": found.sum.reshape(-1)}


def _gather_queries(launch: _Launch, q: jax.Array, arrays: Arrays) -> jax.Array:
    """Gather the queries of each tile and column, `[tiles * columns, rows, H]`; rows that are no query are zeros."""
    column = jnp.arange(launch.columns, dtype=jnp.int32)
    rows = _locate_rows(launch, column[:, None], arrays["row"][:, None, None], arrays["queries"][:, None, None])
    flat = q.reshape(-1, launch.depth)
    found = jnp.where(rows.there[..., None], flat.at[rows.packed].get(mode="clip"), jnp.zeros((), q.dtype))
    return found.reshape(-1, launch.rows, launch.depth)


def _build_launch(plan: PagedPlan, operands: Operands, v_depth: int, *, mosaic: bool) -> _Launch:
    _, num_q_heads, _ = operands.q.shape
    _, page_size, num_kv_heads, depth = operands.k_pages.shape
    heads = min(num_q_heads // num_kv_heads, MAX_ROWS)
    pages_per_seq = operands.page_indices.shape[1]
    return _Launch(
        plan=plan,
        block=plan.block_keys if mosaic else min(plan.block_keys, round_up_to_tile(pages_per_seq * page_size)),
        rows=max(MOSAIC_MIN_ROWS if mosaic else MIN_TILE, 1 << (plan.block_q * heads - 1).bit_length()),
        heads=heads,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        pages_per_seq=pages_per_seq,
        depth=depth,
        v_depth=v_depth,
    )


def _call_kernel(
    launch: _Launch, kernel: Any, name: str, arrays: Arrays, programs: int, rows: int, interpret: bool
) -> Arrays:
    """Run a kernel with `programs` programs per column, which see whole arrays. Returns `out`, `max` and `sum`."""
    varying = jax.typeof(next(iter(arrays.values()))).manual_axis_type

    def whole(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda program, column: (jnp.int32(0),) * x.ndim)

    shapes = {
        "out": make_shape((rows, launch.v_depth), jnp.float32, varying),
        "max": make_shape((rows,), jnp.float32, varying),
        "sum": make_shape((rows,), jnp.float32, varying),
    }
    found: Arrays = build_triton_call(
        functools.partial(kernel, launch),
        name=name,
        grid=(programs, launch.columns),
        in_specs=jax.tree.map(whole, arrays),
        out_shapes=shapes,
        out_specs=jax.tree.map(whole, shapes),
        num_warps=4,
        num_stages=2,
        interpret=interpret,
    )(arrays)
    return found


def _share_kernel(launch: _Launch, inputs: Arrays, outputs: Arrays) -> None:
    """Compute the part over one share of the blocks of one tile."""
    plan, (share, column) = launch.plan, (pl.program_id(0), pl.program_id(1))
    tile, first, end = (inputs[name][share] for name in ("tile", "first", "end"))
    sequence, row, position = (inputs[name][tile] for name in ("sequence", "row", "position"))
    queries = jnp.where(end > first, inputs["queries"][tile], 0)
    rows = _locate_rows(launch, column, row, queries)
    head, _ = launch.place(column)
    q = _gather(inputs["q"], rows.packed, rows.there, launch.depth)  # [rows, H]
    i = (position + rows.query)[:, None]  # [rows, 1]
    keys = inputs["keys"][tile]
    low, _ = find_key_range(plan, position, keys)
    _, high = find_key_range(plan, position + queries - 1, keys)
    at = _Places(sequence, row + rows.query, rows.there, rows.head, i, keys - inputs["queries_in_all"][tile], keys)

    def visit(number: Scalar, old: Part) -> Part:
        j = compute_positions(number * launch.block, launch.block)  # [block]
        # Only keys that some query sees are read: others may be NaN, and 0 * NaN is not 0.
        seen = (j >= low) & (j < high)
        slot = sequence * launch.pages_per_seq + lax.div(j, jnp.int32(launch.page_size))
        page = plt.load(inputs["page_indices"].at[slot], mask=seen, other=0)
        token = page * launch.page_size + lax.rem(j, jnp.int32(launch.page_size))
        place = token * launch.num_kv_heads + head
        # Stored numbers with scales are exact in the dtype of q: int8 and fp8 have fewer bits than bf16.
        k = _gather_as(q.dtype, inputs["k"], place, seen, launch.depth)  # [block, H]
        v = _gather_as(q.dtype, inputs["v"], place, seen, launch.v_depth)  # [block, V]
        of_keys, of_values = (_load_scales(inputs, name, place, seen) for name in _SCALES)
        allowed = compute_allowed(plan, i, j[None, :], keys)
        if plan.mask_mod is not None or "mask" in inputs or "tree_mask" in inputs:
            allowed = allowed & _look_up_masks(plan, inputs, at, j)
            # Keys that these masks hide from every query may be NaN too.
            some = jnp.max(allowed.astype(jnp.int32), axis=0) > 0
            v = jnp.where(some[:, None], v, jnp.zeros_like(v))
        z = _compute_logits(plan, inputs, at, multiply_tiles(q, k, (1, 1)), j, of_keys)
        z = jnp.where(allowed, z, -jnp.inf)  # masked logits, equations (1) to (3)
        top = jnp.maximum(old.max, jnp.max(z, axis=1))  # maximum, equation (4)
        weights, decay = compute_exp(z - replace_neg_inf(top)[:, None]), compute_exp(old.max - replace_neg_inf(top))
        return Part(
            out=old.out * decay[:, None]
            + multiply_tiles(of_values(weights).astype(v.dtype), v, (1, 0)),  # weighted sum of values, eq. (6)
            max=top,
            sum=old.sum * decay + jnp.sum(weights, axis=1),  # sum of weights, equation (5)
        )

    part = lax.fori_loop(first, end, visit, _start_part(launch))
    _store(outputs, _locate_share_rows(launch, share, column), rows.there, part, launch.v_depth)


class _Places(NamedTuple):
    """The places of the rows of a tile, for masks and operands that differ between pairs."""

    sequence: Scalar
    row: jax.Array  # [rows], index of the query among the packed ones
    there: jax.Array  # [rows], whether the row's query and head exist
    head: jax.Array  # [rows], query head
    position: jax.Array  # [rows, 1]
    before: Scalar  # number of keys before those of the sequence's queries
    keys: Scalar  # number of keys of the sequence


def _look_up_masks(plan: PagedPlan, inputs: Arrays, at: _Places, j: jax.Array) -> Any:
    """Look up which keys `j [block]` the rows see by `mask_mod` and by the masks that are arrays, `[rows, block]`."""
    sees: Any = jnp.bool_(True)
    if plan.mask_mod is not None:
        sees = plan.mask_mod(at.sequence, at.head[:, None], at.position, j[None, :])
    for name, first in (("mask", jnp.int32(0)), ("tree_mask", at.before)):
        if name in inputs:
            column = j - first
            stored = (column >= 0) & (column < inputs[name].shape[1])
            read = at.there[:, None] & stored[None, :]
            found = plt.load(inputs[name].at[at.row[:, None], column[None, :]], mask=read, other=0)
            sees = sees & ((column < 0)[None, :] | (found != 0))
    return sees


def _load_scales(inputs: Arrays, name: str, place: jax.Array, seen: jax.Array) -> Callable[[Any], Any]:
    """Load the scale of each key `[block]`; return a function that multiplies by it, the identity without scales."""
    if name not in inputs:
        return lambda x: x
    found = plt.load(inputs[name].at[place], mask=seen, other=0)
    return lambda x: x * found[None, :]


def _compute_logits(
    plan: PagedPlan,
    inputs: Arrays,
    at: _Places,
    products: jax.Array,
    j: jax.Array,
    of_keys: Callable[[Any], Any],
) -> jax.Array:
    """Compute logits with soft cap, equations (1) and (2), from products `[rows, block]`."""
    others = (("logit_scale", 1), ("alibi_slopes", 0))
    factor, slopes = (
        plt.load(inputs[name].at[at.head], mask=at.there, other=other)[:, None] if name in inputs else None
        for name, other in others
    )

    def locate() -> tuple[Any, Any, Any, Any]:
        return at.sequence, at.head[:, None], at.position, j[None, :]

    return compute_changed_logits(plan, products, locate, factor=factor, slopes=slopes, of_keys=of_keys)


def _merge_kernel(launch: _Launch, inputs: Arrays, outputs: Arrays) -> None:
    """Merge the parts of all shares of one tile, and write its rows; they are empty if it has no share."""
    tile, column = pl.program_id(0), pl.program_id(1)
    row, queries, before, count = (inputs[name][tile] for name in ("row", "queries", "before", "own"))
    rows = _locate_rows(launch, column, row, queries)

    def add(number: Scalar, old: Part) -> Part:
        place = _locate_share_rows(launch, before + number, column)
        new = Part(
            out=_gather(inputs["out"], place, rows.there, launch.v_depth),
            max=plt.load(inputs["max"].at[place], mask=rows.there, other=-jnp.inf),
            sum=plt.load(inputs["sum"].at[place], mask=rows.there, other=0),
        )
        top = jnp.maximum(old.max, new.max)
        decay, weight = compute_exp(old.max - replace_neg_inf(top)), compute_exp(new.max - replace_neg_inf(top))
        return Part(
            out=old.out * decay[:, None] + new.out * weight[:, None],
            max=top,
            sum=old.sum * decay + new.sum * weight,
        )

    _store(
        outputs, rows.packed, rows.there, lax.fori_loop(jnp.int32(0), count, add, _start_part(launch)), launch.v_depth
    )


def _locate_rows(launch: _Launch, column: Scalar, row: Scalar, queries: Scalar) -> _Rows:
    """Locate the rows of a tile that begins with the packed query `row`."""
    number = compute_positions(0, launch.rows)
    query, inside = lax.div(number, jnp.int32(launch.heads)), lax.rem(number, jnp.int32(launch.heads))
    head, part = launch.place(column)
    of_group = part * launch.heads + inside
    return _Rows(
        query=query,
        there=(query < queries) & (of_group < launch.group),
        packed=(row + query) * launch.num_q_heads + head * launch.group + of_group,
        head=head * launch.group + of_group,
    )


def _locate_share_rows(launch: _Launch, share: Scalar, column: Scalar) -> jax.Array:
    """Locate the rows of a share, which are contiguous."""
    return compute_positions((share * launch.columns + column) * launch.rows, launch.rows)


def _start_part(launch: _Launch) -> Part:
    return Part(
        out=jnp.zeros((launch.rows, round_up_to_tile(launch.v_depth)), jnp.float32),
        max=jnp.full((launch.rows,), -jnp.inf, jnp.float32),
        sum=jnp.zeros((launch.rows,), jnp.float32),
    )


def _locate_elements(ref: Ref, rows: jax.Array, there: jax.Array, depth: int) -> tuple[Any, jax.Array]:
    """Locate arbitrary rows of `[., depth]`, padded to the width of a tile, and find which elements exist."""
    d = compute_positions(0, round_up_to_tile(depth))[None, :]
    return ref.at[rows[:, None], d], there[:, None] & (d < depth)


def _gather(ref: Ref, rows: jax.Array, there: jax.Array, depth: int) -> jax.Array:
    at, exist = _locate_elements(ref, rows, there, depth)
    found: jax.Array = plt.load(at, mask=exist, other=0)
    return found


def _gather_as(dtype: Any, ref: Ref, rows: jax.Array, there: jax.Array, depth: int) -> jax.Array:
    """Gather rows in another dtype. Elements that do not exist are zero; Triton loads no zero of fp8 in their place."""
    if ref.dtype == dtype:
        return _gather(ref, rows, there, depth)
    at, exist = _locate_elements(ref, rows, there, depth)
    return jnp.where(exist, plt.load(at, mask=exist).astype(jnp.float32), 0.0).astype(dtype)


def _store(outputs: Arrays, rows: jax.Array, there: jax.Array, part: Part, depth: int) -> None:
    at, exist = _locate_elements(outputs["out"], rows, there, depth)
    plt.store(at, part.out, mask=exist)
    plt.store(outputs["max"].at[rows], part.max, mask=there)
    plt.store(outputs["sum"].at[rows], part.sum, mask=there)
