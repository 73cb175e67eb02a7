"""What the kernels have in common: reading tiles in their layout, products, logits, the mask of a pair of blocks.

(1)  x_ij = scale <q_i, k_j>
(2)  z_ij = soft_cap tanh(x_ij / soft_cap)
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from impls.splash_tpu.block_sizes import LANES, Layout
from impls.splash_tpu.diagonal_bands import (
    BlockPart,
    KeySpan,
    compute_allowed_in_band,
    cut_block,
    find_band,
    iter_parts,
    split_whole_block,
)
from impls.splash_tpu.splash_plan import KernelCall
from impls.splash_tpu.splash_schedule import COMPUTE, FIRST, LAST, MASKED, PART

LOG_2 = math.log(2)
EMPTY_MAXIMUM = float(np.finfo(np.float32).min)
"""The maximum of no logits: finite, so that `exp(-inf - maximum)` is 0 and not NaN, and nothing is asked for that."""


class Step(NamedTuple):
    """Scalars of the step that a kernel is at.

    A scalar that is the same for every step is a Python bool, so that the kernel has no code to test it.
    """

    q: Any  # block of queries, none where no position is needed
    kv: Any  # block of keys, likewise
    row: Any  # query head among those of all batch rows
    first: Any  # of its block of results, and of the heads of a group
    last: Any
    computes: Any  # whether the pair of blocks contributes
    masked: Any  # whether the mask hides part of the pair of blocks
    part: Callable[[int], Any]  # by number, whether it leaves anything of a part of a masked block, or where that lies

    @property
    def unmasked(self) -> Any:
        """Whether the mask hides nothing of it."""
        return not self.masked if isinstance(self.masked, bool) else jnp.logical_not(self.masked)


def parse_flags(call: KernelCall, flags: Callable[[], jax.Array], length: int) -> dict[str, Any]:
    """What the flags of a step say, by field of `Step`, read only where it differs between the steps of a list.

    Args:
      call: the kernel.
      flags: reads them.
      length: steps of a list.
    """
    kinds = call.kinds
    mixed = kinds.full and kinds.masked
    told = kinds.parts or len(kinds.diagonals) > 1
    bits: Any = flags() if length > 1 or kinds.empty or mixed or told else None
    return {
        "first": True if length == 1 else bits & FIRST > 0,
        "last": True if length == 1 else bits & LAST > 0,
        "computes": bits & COMPUTE > 0 if kinds.empty else True,
        "masked": bits & MASKED > 0 if mixed else kinds.masked,
        "part": lambda number: bits & (PART << number) > 0 if told else True,
    }


def when(*conditions: Any) -> Callable[[Callable[[], None]], None]:
    """Run what follows if all conditions hold; those that are Python bools take no code."""
    asked = [c for c in conditions if c is not True]
    if not asked:
        return lambda body: body()
    if any(c is False for c in asked):
        return lambda body: None
    return pl.when(functools.reduce(operator.and_, asked))


def add_block(call: KernelCall, step: Step, add: Callable[[tuple[BlockPart, ...]], None]) -> None:
    """Add a pair of blocks, and of one that the mask hides in part only the parts of which it leaves anything.

    Args:
      call: the kernel.
      step: where it is.
      add: adds parts of it.
    """
    blocks, kinds = call.blocks, call.kinds
    if kinds.full:
        # Of the forward, several parts are under way at a time.
        rows = blocks.static_parts[0] if call.phase == "forward" else blocks.q
        when(step.computes, step.unmasked)(lambda: add(split_whole_block(blocks, rows, masked=False)))
    if not kinds.masked:
        return
    if kinds.diagonals:
        band = find_band(call.plan.mask)
        assert band is not None
        for number, diagonal in enumerate(kinds.diagonals):
            here = step.part(number) if len(kinds.diagonals) > 1 else True
            when(step.computes, step.masked, here)(functools.partial(add, cut_block(blocks, band, diagonal)))
    elif call.fused or not kinds.parts:  # fused, each part would take dq from HBM and back
        when(step.computes, step.masked)(lambda: add(split_whole_block(blocks, blocks.q, masked=True)))
    else:
        for number, part in enumerate(iter_parts(blocks)):
            when(step.computes, step.masked, step.part(number))(functools.partial(add, (part,)))


def read_tile(ref: Any, layout: Layout, start: int = 0, size: int | None = None) -> tuple[jax.Array, int]:
    """Rows of an operand's block, and which axis of the tile is the depth."""
    if layout == "head_dim_minor":
        return (ref[...] if size is None else ref[start : start + size, :]), 1
    return (ref[...] if size is None else ref[:, start : start + size]), 0


def multiply(call: KernelCall, a: jax.Array, a_axis: int, b: jax.Array, b_axis: int) -> jax.Array:
    """Sum over one axis of each, in f32."""
    if call.plan.interpret and a.dtype == b.dtype == jnp.bfloat16:
        # The same values: a product of two bf16 is exact in f32. XLA multiplies f32 on a CPU ten times faster.
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return lax.dot_general(
        a, b, (((a_axis,), (b_axis,)), ((), ())), precision=call.precision, preferred_element_type=jnp.float32
    )


def make_column(row: jax.Array) -> jax.Array:
    """A row `[1, n]` turned to `[n, 128]`, the same in every lane."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def load_query_columns(inputs: Any, scratch: Any) -> None:
    """What says which keys a query sees, as columns, as far as the kernel has it: ids, and ends of ranges."""
    for name in ("q_ids", "low", "high"):
        if (kept := getattr(scratch, name)) is not None:
            kept[...] = make_column(getattr(inputs, name)[...])


def repeat_lanes(x: jax.Array, lanes: int) -> jax.Array:
    """`[n, 128]`, the same in every lane, as `[n, lanes]`: the same registers over again, and no work.

    Broadcasting `x[:, :1]` permutes the lanes of every register instead: so the compiler's schedule of a full block of
    512 by 512 in the forward had 2,374 cycles on v5e, and has 1,309.
    """
    return jnp.concatenate([x] * (-(-lanes // LANES)), axis=1)[:, :lanes]


def sum_by_lane(x: jax.Array) -> jax.Array:
    """Sums `[n, 128]` of every 128th column: plain additions, where a sum over lanes takes the unit that moves them."""
    return functools.reduce(operator.add, (x[:, at : at + LANES] for at in range(0, x.shape[1], LANES)))


def compute_logits(call: KernelCall, products: jax.Array, unit: float = 1.0) -> tuple[jax.Array, jax.Array | None]:
    """Logits of products `<q, k>`, counted in `unit`, and the derivative of (2), none without a soft cap."""
    cap = call.plan.soft_cap
    if cap is None:
        return products * jnp.float32(call.scale / unit), None  # (1)
    tanh = jnp.tanh(products * jnp.float32(call.scale / cap))
    return tanh * jnp.float32(cap / unit), 1 - tanh * tanh  # (2)


class MaskInputs(NamedTuple):
    """What the mask of a pair of blocks is found from. Segment ids are a column of one axis and a row of the other."""

    step: Step
    q_offset: Callable[[], Any]
    stored: Any
    ids: Any  # [n, 128] of the axis that is the rows of the tile
    other_ids: Any  # [1, m] of the other
    low: Any = None  # of the queries, `[n, 128]` where they are the rows of the tile, else `[1, n]`
    high: Any = None  # likewise


def compute_allowed(call: KernelCall, masking: MaskInputs, rows: slice, keys: KeySpan) -> jax.Array | None:
    """Booleans of one step of computing, none if every pair is allowed: `[q, kv]`, for dk and dv `[kv, q]`.

    Args:
      call: the kernel.
      masking: of the pair of blocks.
      rows: its queries inside the block.
      keys: its keys, and whether the mask hides any; segment ids may hide any.
    """
    blocks = call.blocks
    own = slice(keys.start, keys.start + keys.size)
    transposed = call.phase == "dkv"
    size = rows.stop - rows.start
    shape = (keys.size, size) if transposed else (size, keys.size)
    if call.ranged:
        return _compute_allowed_in_ranges(call, masking, rows, keys, shape) if keys.masked else None
    found = None
    if keys.masked and masking.stored is not None:
        stored = masking.stored[own, rows] if transposed else masking.stored[rows, own]
        found = stored.astype(jnp.int32) != 0
    elif keys.masked:
        found = _evaluate_mask(call, masking, rows, keys, functools.partial(lax.broadcasted_iota, jnp.int32, shape))
    if call.segmented:
        if transposed:
            same = repeat_lanes(masking.ids[own, :], size) == masking.other_ids[:, rows]
        else:
            same = repeat_lanes(masking.ids[rows, :], keys.size) == masking.other_ids[:, own]
        found = same if found is None else found & same
    if found is not None and call.plan.q_length % blocks.q:
        # Rows that only fill the last block see no key: what they would see may hold NaN.
        row = lax.broadcasted_iota(jnp.int32, shape, 1 if transposed else 0) + (masking.step.q * blocks.q + rows.start)
        found = found & (row < call.plan.q_length)
    return found


def _evaluate_mask(
    call: KernelCall, masking: MaskInputs, rows: slice, keys: KeySpan, place: Callable[[int], jax.Array]
) -> jax.Array | None:
    """What the formula of the mask allows, `place` the places in the tile along an axis."""
    plan, blocks, step = call.plan, call.blocks, masking.step
    of_keys, of_queries = (0, 1) if call.phase == "dkv" else (1, 0)
    band = find_band(plan.mask)
    if keys.diagonal is not None:
        assert band is not None
        return compute_allowed_in_band(
            band, keys, rows.stop - rows.start, place(of_keys) - place(of_queries), keys.diagonal
        )
    first_query = masking.q_offset() + (step.q * blocks.q + rows.start)
    first_key = step.kv * blocks.kv + keys.start
    if band is None:
        assert plan.mask is not None
        found = plan.mask.allowed(place(of_queries) + first_query, place(of_keys) + first_key)
    else:
        difference = place(of_keys) - place(of_queries)
        found = compute_allowed_in_band(band, keys, rows.stop - rows.start, difference, first_key - first_query)
    if plan.kv_length % blocks.kv:
        exists = place(of_keys) < plan.kv_length - first_key
        found = exists if found is None else found & exists
    return found


def _compute_allowed_in_ranges(
    call: KernelCall, masking: MaskInputs, rows: slice, keys: KeySpan, shape: tuple[int, int]
) -> jax.Array:
    """The pairs of a key that lies in the range of the query's. What only fills a block is in no range, or has none."""
    first = masking.step.kv * call.blocks.kv + keys.start
    if call.phase == "dkv":
        low, high = (ref[:, rows] - first for ref in (masking.low, masking.high))
        place = lax.broadcasted_iota(jnp.int32, shape, 0)
    else:
        low, high = (repeat_lanes(ref[rows, :] - first, keys.size) for ref in (masking.low, masking.high))
        place = lax.broadcasted_iota(jnp.int32, shape, 1)
    return (place >= low) & (place < high)


def find_seen_keys(call: KernelCall, found: jax.Array, layout: Layout, depth: int) -> jax.Array:
    """Which keys some query of the tile may attend to, shaped to select in a tile of keys or values."""
    some = found.astype(jnp.float32)
    if call.phase == "dkv":
        keys = some.max(axis=1, keepdims=True)  # [kv, 1]
        return keys > 0 if layout == "head_dim_minor" else keys.T > 0
    row = some.max(axis=0, keepdims=True)  # [1, kv]
    return repeat_lanes(make_column(row), depth) > 0 if layout == "head_dim_minor" else row > 0


def zero_unseen_keys(call: KernelCall, x: jax.Array, found: jax.Array | None, layout: Layout) -> jax.Array:
    """`x` with keys that no query of the tile may attend to set to zero: NaN times a probability of zero is NaN.

    Only where there may be dead keys, which may hold NaN: of a mask known before the call, under which every key is
    seen by some query, none is dead, and what no query of the tile may attend to is finite. Finding such keys takes a
    sixth of a masked block of 1024 by 1024 in the forward, 900 cycles of 5,500 on v5e.
    """
    if found is None or not (call.kinds.dead or call.segmented):
        return x
    return jnp.where(find_seen_keys(call, found, layout, x.shape[-1]), x.astype(jnp.float32), 0.0).astype(x.dtype)
