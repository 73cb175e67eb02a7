"""Attention of a tile of queries over one share of its keys, for Hopper in Mosaic GPU.

A program computes one share of the keys of one tile of queries, for the query heads of one column (a set of query
heads of one key/value head). It visits the share's tiles of 64 keys, those that every query sees completely first.
It computes equations (1) to (6) of `impls/__init__.py`, without sink and division.

Decoding reads every key once and computes little with it, so the kernel is built around its copies. A program has one
warpgroup. As soon as it has computed a tile, it starts the copies of a later one into the same slot of the ring. They
are one copy by TMA for each page of k and of v. The other slots arrive meanwhile. There is no warpgroup that only
copies: copies take few instructions, and without it two programs fit a multiprocessor with all the registers that they
need. While one of them begins or ends, the other one reads.

Only stored bytes are copied. Quantised keys and values are converted in registers, and stored in a tile of their own.

The rows of a group's queries are few, but the tensor core multiplies 64 rows. The others are zeros.

The properties of copies and products that `impls.flash_gpu.mosaic.mosaic_launch` lists hold here too. Two come on top,
which JAX's interpreter does not check:

  - `commit_smem` comes between the last access to a slot and the next copies into it. It is a barrier of the
    warpgroup, and a fence between its accesses and those of TMA.
  - The result is staged in the memory of the ring, once all copies have arrived and all products have ended.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32, Shaped

from impls.block_arithmetic import LN_2, make_shape
from impls.jax_compat import Interpret, Scalar, build_mosaic_call, get_device_kind, load_device_vector
from impls.pallas_gpu.mosaic_tiles import (
    LANES,
    ROWS,
    SHARED_MEMORY,
    SUM_COLUMNS,
    RunningSoftmax,
    accumulate,
    allocate_tile,
    broadcast_over_keys,
    compute_logits,
    find_compiler_limit,
    find_device_limit,
    multiply,
    update_softmax,
)
from impls.varying_axes import find_varying_axes, mark_varying

TILE_KEYS = 64
"""Keys per tile."""
MAX_DEPTH = 256
"""Largest head depth of keys and of values: beyond it, the output in f32 leaves a thread too few registers."""
MIN_PAGE_ROWS = 8
"""Page sizes are multiples of this: the swizzled layout of shared memory has groups of 8 rows."""
MAX_SLOTS = 6
"""Most tiles in flight. It is reasoned, not measured: two programs of depth 64 then have 192 KiB in flight."""
QUANTIZED_DTYPES = ("int8", "float8_e4m3fn")
"""Dtypes of stored keys and values whose numbers bf16 and f16 hold exactly."""
_PROGRAMS_PER_MULTIPROCESSOR = 2
# CUDA reserves 1 KiB of shared memory for each block (CUDA C++ programming guide, "Compute capabilities").
_SHARED_MEMORY_OF_TWO = (SHARED_MEMORY + 1024) // 2 - 1024
_BARRIER_BYTES = 1024
_ALIGNMENT = 1024  # bytes; each buffer starts at a multiple


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """Static part of a launch. It also has what `impls.pallas_gpu.mosaic_tiles` needs to know of a call."""

    head_dim: int
    v_head_dim: int
    rows: int  # rows of queries per tile that are copied in and out, a multiple of 8; the others are zeros
    columns: int  # programs per share, one for each set of query heads that is computed together
    columns_per_head: int  # columns of one key/value head
    page_size: int
    dtype: Any  # dtype of queries, in which tiles are multiplied
    stored_dtype: Any  # dtype of keys and values, either `dtype` or one of `QUANTIZED_DTYPES`
    scale: float
    soft_cap: float | None
    interpret: Interpret

    def unit(self, *, biased: bool) -> float:
        """Return the unit of the logits in the kernel, as `impls.flash_gpu.tile_schedule.FlashGpuPlan.unit` does."""
        return self.scale if self.soft_cap is None and not biased and self.scale > 0 else 1.0

    @property
    def copies(self) -> int:
        """Number of copies per tile of k: one for each page that the tile spans."""
        return max(1, TILE_KEYS // self.page_size)

    @property
    def rows_per_copy(self) -> int:
        """Rows of a page that one copy reads."""
        return min(TILE_KEYS, self.page_size)

    @property
    def slots(self) -> int:
        """Tiles of k and v in flight."""
        return count_slots(self.head_dim, self.v_head_dim, self.stored_dtype)[0]

    @property
    def is_quantized(self) -> bool:
        """Return whether keys and values are converted before they are multiplied."""
        return is_quantized(self.stored_dtype)


def is_quantized(stored_dtype: Any) -> bool:
    """Return whether keys and values of this dtype are converted before they are multiplied."""
    return str(jnp.dtype(stored_dtype)) in QUANTIZED_DTYPES


def count_slots(head_dim: int, v_head_dim: int, stored_dtype: Any) -> tuple[int, int]:
    """Count the slots of a program's ring, and the programs that fit a multiprocessor together.

    There are two programs if each of them has two slots: while one begins or ends, the other one reads.
    """
    pair = TILE_KEYS * (head_dim + v_head_dim)  # elements of a tile of k and one of v
    slot = pair * jnp.dtype(stored_dtype).itemsize
    # The queries, and the tiles that stored keys and values are converted to.
    others = ROWS * head_dim * 2 + (pair * 2 if is_quantized(stored_dtype) else 0) + _BARRIER_BYTES
    # The results take the memory of the ring in the end: the output, and two numbers for each row.
    results = ROWS * v_head_dim * 4 + 2 * _ALIGNMENT
    slots = (_SHARED_MEMORY_OF_TWO - others) // slot
    if slots >= 2 and results <= _SHARED_MEMORY_OF_TWO - others:
        return min(slots, MAX_SLOTS), _PROGRAMS_PER_MULTIPROCESSOR
    return min((SHARED_MEMORY - others) // slot, MAX_SLOTS), 1


def find_decode_limit(
    interpret: Interpret, dtype: Any, head_dim: int, v_head_dim: int, page_size: int, rows: int
) -> str | None:
    """Return what the kernel does not support about a call, or None if it supports the call.

    Args:
      interpret: whether the kernel is interpreted; then it needs no Hopper GPU.
      rows: query tokens times query heads of a tile.
    """
    if not interpret and (reason := find_device_limit(get_device_kind("gpu")) or find_compiler_limit()) is not None:
        return reason
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"q in {dtype}: it multiplies bfloat16 and float16"
    if rows > ROWS:
        return f"{rows} rows of queries per tile (block_q times the heads of a group), at most {ROWS}"
    return find_shape_limit(head_dim, v_head_dim, page_size)


def find_shape_limit(head_dim: int, v_head_dim: int, page_size: int) -> str | None:
    """Return what the kernel does not support about these sizes, or None if it supports them."""
    for name, depth in (("head_dim", head_dim), ("v_head_dim", v_head_dim)):
        if depth % LANES or depth > MAX_DEPTH:
            return f"{name} {depth}: it takes multiples of {LANES} up to {MAX_DEPTH}"
    if page_size % MIN_PAGE_ROWS or (TILE_KEYS % page_size and page_size % TILE_KEYS):
        return f"page_size {page_size}: it takes 8, 16, 32 and multiples of {TILE_KEYS}"
    return None


_MAX_INT32 = 2**31 - 1


class Shares(NamedTuple):
    """Shares of keys: the tile of queries of each, and its blocks of `TILE_KEYS` keys. Int32; some shares are empty."""

    tile: Int32[Array, " W"]
    first: Int32[Array, " W"]
    end: Int32[Array, " W"]


class VisibleKeys(NamedTuple):
    """Keys that the rows of each tile of queries see: `low <= j < high`. Int32.

    All rows of a tile together see one run of keys. A row of padding sees the same keys as another row.
    """

    low: Int32[Array, "L {ROWS}"]
    high: Int32[Array, "L {ROWS}"]


class ShareParts(NamedTuple):
    """Parts of attention over each share's keys, in order of shares, then columns; empty shares are never written."""

    out: Float32[Array, "W*columns rows V"]
    max: Float32[Array, "W*columns rows"]
    sum: Float32[Array, "W*columns rows"]


def attend_to_shares(
    shape: DecodeShape,
    queries: Float[Array, "L*columns rows H"],
    k_pages: Shaped[Array, "pages page_size K H"],
    v_pages: Shaped[Array, "pages page_size K V"],
    page_indices: Int32[Array, "max_seqs pages_per_seq"],
    sequence: Int32[Array, " L"],
    shares: Shares,
    visible: VisibleKeys,
) -> ShareParts:
    """Compute the part of each share.

    Args:
      queries: queries of each tile and column; rows that are no query are zeros.
      k_pages: pages of keys. Quantised ones are multiplied as they are stored: scales are the caller's.
      page_indices: pages of each sequence. Entries of pages without a key that any query sees may be any integers.
      sequence: sequence of each tile.
      visible: keys that the rows of each tile see.
    """
    inputs = {
        "q": queries,
        "k": k_pages,
        "v": v_pages,
        "pages": page_indices.reshape(-1),
        "page_base": sequence * page_indices.shape[1],
        **shares._asdict(),
        "row_low": visible.low.reshape(-1),
        "row_high": visible.high.reshape(-1),
        **_find_tile_ranges(visible, shape.page_size),
    }
    programs, names = len(shares.tile) * shape.columns, tuple(inputs)

    def body(*references: Any, **scratch: Any) -> None:
        named = dict(zip(names, references[: len(names)], strict=True))
        _run_program(shape, named, references[len(names) :], scratch)

    found = build_mosaic_call(
        body,
        name="decode_shares",
        grid={"program": programs},
        warpgroups=1,
        outputs=(
            make_shape((programs, shape.rows, shape.v_head_dim), jnp.float32),
            make_shape((programs, shape.rows), jnp.float32),
            make_shape((programs, shape.rows), jnp.float32),
        ),
        scratch=build_scratch(shape),
        approximate=shape.soft_cap is None,  # tanh must be exact; without a soft cap only powers of two are computed
        interpret=shape.interpret,
        reduction_bytes=0,  # else two programs of depth 128 would not fit a multiprocessor
    )(*inputs.values())
    # Under `shard_map`, outputs vary over the same mesh axes as the operands, which the call itself does not mark.
    return ShareParts(*mark_varying(found, find_varying_axes(inputs)))


def build_scratch(shape: DecodeShape) -> dict[str, Any]:
    """Describe the shared memory and barriers of a program by name."""
    depths = {"k": shape.head_dim, "v": shape.v_head_dim}
    ring = {f"{name}_tile": _allocate_stored(shape, depth) for name, depth in depths.items()}
    converted = {f"{name}_converted": allocate_tile(shape.dtype, TILE_KEYS, depth) for name, depth in depths.items()}
    results = {
        "out_tile": allocate_tile(jnp.float32, ROWS, shape.v_head_dim),
        "max_tile": plgpu.SMEM((ROWS,), jnp.float32),
        "sum_tile": plgpu.SMEM((ROWS,), jnp.float32),
    }
    return {
        "q_tile": allocate_tile(shape.dtype, ROWS, shape.head_dim),
        **(converted if shape.is_quantized else {}),
        # JAX's interpreter has no memory with two meanings.
        **({**ring, **results} if shape.interpret else {"ring": plgpu.RefUnion(ring, results)}),
        "q_arrived": plgpu.Barrier(num_barriers=1),
        "k_arrived": plgpu.Barrier(num_arrivals=shape.copies, num_barriers=shape.slots),
        "v_arrived": plgpu.Barrier(num_arrivals=shape.copies, num_barriers=shape.slots),
    }


def _allocate_stored(shape: DecodeShape, depth: int) -> Any:
    """Allocate the ring of tiles of k or of v, as they are stored."""
    if not shape.is_quantized:
        return allocate_tile(shape.dtype, shape.slots, TILE_KEYS, depth)
    lanes = 128 if depth % 128 == 0 else 64  # elements of one byte in the widest swizzle that divides the depth
    transforms = (plgpu.TilingTransform((8, lanes)), plgpu.SwizzleTransform(lanes))
    return plgpu.SMEM((shape.slots, TILE_KEYS, depth), shape.stored_dtype, transforms=transforms)


def _find_tile_ranges(visible: VisibleKeys, page_size: int) -> dict[str, jax.Array]:
    """Find what each tile of queries sees: keys of any row, blocks of all rows, and its first and last page; `[L]`."""
    some = visible.low < visible.high
    low = jnp.where(some, visible.low, _MAX_INT32).min(axis=1)
    high = jnp.where(some, visible.high, 0).max(axis=1)
    low = jnp.minimum(low, high)
    return {
        "low": low,
        "high": high,
        "full_first": (visible.low.max(axis=1) + (TILE_KEYS - 1)) // TILE_KEYS,
        "full_end": visible.high.min(axis=1) // TILE_KEYS,
        "first_page": low // page_size,
        "last_page": jnp.maximum(high - 1, 0) // page_size,
    }


def _run_program(shape: DecodeShape, inputs: dict[str, Any], outputs: Any, scratch: dict[str, Any]) -> None:
    """Compute the share and column of a program; the programs of a share are neighbours, which read the same pages."""
    program = lax.axis_index("program")
    share, column = lax.div(program, jnp.int32(shape.columns)), lax.rem(program, jnp.int32(shape.columns))
    first, end = inputs["first"][share], inputs["end"][share]
    if "ring" in scratch:
        ring, results = scratch["ring"]
        scratch = {**scratch, **ring, **results}

    @pl.when(end > first)
    def _compute() -> None:
        visit = _ShareVisit.of(shape, inputs, scratch, share, column)
        softmax = _compute_softmax(visit)
        tiles = [scratch[f"{name}_tile"] for name in ShareParts._fields]
        for tile, values in zip(tiles, (softmax.out, softmax.maximum * jnp.float32(LN_2), softmax.total), strict=True):
            tile[...] = values
        plgpu.commit_smem()
        for tile, output in zip(tiles, outputs, strict=True):
            plgpu.copy_smem_to_gmem(tile.at[pl.ds(0, shape.rows)], output.at[program])
        plgpu.wait_smem_to_gmem(0)


class _ShareVisit(NamedTuple):
    """One program's share of keys, and the order in which it visits their tiles."""

    shape: DecodeShape
    inputs: dict[str, Any]
    scratch: dict[str, Any]
    tile: Scalar  # tile of queries
    head: Scalar  # key/value head
    query: Scalar  # tile of queries and column, as one index
    page_base: Scalar  # where the pages of the tile's sequence begin
    first_page: Scalar  # first page that the tile sees, counted in its sequence
    last_page: Scalar  # last page that the tile sees
    first: Scalar  # first block of keys
    total: Scalar  # number of blocks
    full_first: Scalar  # first of the blocks that all rows see completely
    full: Scalar  # number of those

    @classmethod
    def of(
        cls, shape: DecodeShape, inputs: dict[str, Any], scratch: dict[str, Any], share: Scalar, column: Scalar
    ) -> _ShareVisit:
        """Look up the share of a program."""
        tile, first, end = (inputs[name][share] for name in ("tile", "first", "end"))
        full_first = jnp.clip(inputs["full_first"][tile], first, end)
        full_end = jnp.clip(inputs["full_end"][tile], full_first, end)
        return cls(
            shape=shape,
            inputs=inputs,
            scratch=scratch,
            tile=tile,
            head=lax.div(column, jnp.int32(shape.columns_per_head)),
            query=tile * shape.columns + column,
            **{name: inputs[name][tile] for name in ("page_base", "first_page", "last_page")},
            first=first,
            total=end - first,
            full_first=full_first,
            full=full_end - full_first,
        )

    def find_block(self, step: Scalar) -> Any:
        """Find the block of keys that is visited at a step: the full ones, those before them, those after them."""
        rest = step - self.full
        before = self.full_first - self.first
        return jnp.where(
            step < self.full,
            self.full_first + step,
            jnp.where(rest < before, self.first + rest, self.full_first + self.full + (rest - before)),
        )

    def slot(self, step: Scalar) -> Any:
        """Compute the ring slot of a step."""
        slots = self.shape.slots
        return step & jnp.int32(slots - 1) if slots & (slots - 1) == 0 else lax.rem(step, jnp.int32(slots))

    def look_up_pages(self, step: Scalar) -> tuple[Any, ...]:
        """Look up the pages of a step's keys. Pages that the tile does not see are replaced by its nearest one.

        Their keys are hidden, so each copy may read any page. A page that another copy reads comes from the cache.
        """
        block = self.find_block(jnp.minimum(step, self.total - 1))
        copies, size = self.shape.copies, self.shape.page_size
        if size > TILE_KEYS:
            numbers = [lax.div(block, jnp.int32(size // TILE_KEYS))]
        else:
            numbers = [block * copies + at for at in range(copies)]
        seen = (jnp.clip(number, self.first_page, self.last_page) for number in numbers)
        return tuple(self.inputs["pages"][self.page_base + number] for number in seen)

    def copy(self, step: Scalar, pages: tuple[Any, ...]) -> None:
        """Start the copies of a step's tiles of k and v, if there is such a step."""
        inputs, scratch, size = self.inputs, self.scratch, self.shape.rows_per_copy

        @pl.when(step < self.total)
        def _copy() -> None:
            slot = self.slot(step)
            start: Any = 0
            if (blocks := self.shape.page_size // TILE_KEYS) > 1:
                start = lax.rem(self.find_block(step), jnp.int32(blocks)) * TILE_KEYS
            for name in ("k", "v"):
                for at, page in enumerate(pages):
                    plgpu.copy_gmem_to_smem(
                        inputs[name].at[page, pl.ds(start, size), self.head],
                        scratch[f"{name}_tile"].at[slot, pl.ds(at * size, size)],
                        scratch[f"{name}_arrived"].at[slot],
                    )


def _load_queries(visit: _ShareVisit) -> None:
    """Start to copy the queries to shared memory, whose other rows become zeros."""
    q, shape = visit.scratch["q_tile"], visit.shape
    if shape.rows < ROWS:
        _store(q, jnp.zeros((ROWS, shape.head_dim), shape.dtype))
    plgpu.copy_gmem_to_smem(
        visit.inputs["q"].at[visit.query], q.at[pl.ds(0, shape.rows)], visit.scratch["q_arrived"].at[0]
    )


def _compute_softmax(visit: _ShareVisit) -> RunningSoftmax:
    """Compute the softmax of a tile of queries over all keys of the share."""
    shape, scratch = visit.shape, visit.scratch
    # All pages are looked up before the first copy starts, so that the latencies of these reads overlap.
    pages = [visit.look_up_pages(jnp.int32(step)) for step in range(shape.slots + 1)]
    for step in range(shape.slots):
        visit.copy(jnp.int32(step), pages[step])
    _load_queries(visit)
    plgpu.barrier_wait(scratch["q_arrived"].at[0])
    q = scratch["q_tile"]  # [ROWS, H]

    def compute(masked: bool, step: Scalar, carry: Any) -> Any:
        softmax, next_pages = carry
        slot = visit.slot(step)
        plgpu.barrier_wait(scratch["k_arrived"].at[slot])
        k = scratch["k_tile"].at[slot]  # [TILE_KEYS, H]
        if shape.is_quantized:
            k = _store(scratch["k_converted"], _convert(shape, k[...]))
        z, _ = compute_logits(shape, multiply(shape, q, k, transposed=True))  # [ROWS, TILE_KEYS], eqs. (1), (2)
        start = visit.find_block(step) * TILE_KEYS
        if masked:
            z = jnp.where(_compute_allowed(visit, start), z, -jnp.inf)  # hidden pairs get -inf, equation (3)
        softmax, weights = update_softmax(shape, softmax, z, masked=masked)  # maximum and sum, equations (4) and (5)
        plgpu.barrier_wait(scratch["v_arrived"].at[slot])
        v = scratch["v_tile"].at[slot]  # [TILE_KEYS, V]
        if masked or shape.is_quantized:
            values = _convert(shape, v[...])
            if masked:
                values = _zero_unseen(visit, start, values)  # they may be NaN, and 0 * NaN is not 0
            # No other program reads a tile of the ring, so it may be changed in place.
            v = _store(scratch["v_converted"] if shape.is_quantized else v, values)
        out = accumulate(shape, softmax.out, weights.astype(shape.dtype), v)  # sum of values, equation (6)
        following = visit.look_up_pages(step + (shape.slots + 1))  # read one step early: its latency is that of memory
        plgpu.commit_smem()
        visit.copy(step + shape.slots, next_pages)
        return softmax._replace(out=out), following

    carry: Any = (
        RunningSoftmax(
            maximum=jnp.full((ROWS,), -jnp.inf, jnp.float32),
            total=jnp.zeros((ROWS, SUM_COLUMNS), jnp.float32),
            out=jnp.zeros((ROWS, shape.v_head_dim), jnp.float32),
        ),
        pages[-1],
    )
    carry = lax.fori_loop(jnp.int32(0), visit.full, functools.partial(compute, False), carry)
    softmax, _ = lax.fori_loop(visit.full, visit.total, functools.partial(compute, True), carry)
    found: RunningSoftmax = softmax._replace(total=jnp.sum(softmax.total, axis=1))
    return found


def _convert(shape: DecodeShape, tile: jax.Array) -> jax.Array:
    """Convert a tile of stored keys or values to the dtype of the queries, which is exact."""
    if shape.is_quantized and jnp.issubdtype(tile.dtype, jnp.floating):
        tile = tile.astype(jnp.float32)  # Hopper does not convert fp8 to bf16 directly
    return tile.astype(shape.dtype)


def _store(target: Scalar, tile: jax.Array) -> Any:
    """Store a tile in shared memory for a product, and return where it is."""
    target[...] = tile
    plgpu.commit_smem()
    return target


def _compute_allowed(visit: _ShareVisit, start: Scalar) -> jax.Array:
    """Compute which keys of a tile each row sees, `[rows, keys]`."""
    j = lax.broadcasted_iota(jnp.int32, (ROWS, TILE_KEYS), 1) + start
    rows = pl.ds(visit.tile * ROWS, ROWS)
    low, high = (
        load_device_vector(visit.inputs[name].at[rows], visit.shape.interpret) for name in ("row_low", "row_high")
    )
    found: jax.Array = (j >= broadcast_over_keys(low, TILE_KEYS)) & (j < broadcast_over_keys(high, TILE_KEYS))
    return found


def _zero_unseen(visit: _ShareVisit, start: Scalar, v: jax.Array) -> jax.Array:
    """Zero the rows of a tile of values that no row of queries sees."""
    j = lax.broadcasted_iota(jnp.int32, v.shape, 0) + start
    seen = (j >= visit.inputs["low"][visit.tile]) & (j < visit.inputs["high"][visit.tile])
    return jnp.where(seen, v, jnp.zeros_like(v))
