"""Decode attention for TPUs in Pallas: one grid step for each block with a visible key.

The kernel computes a part, equations (1) to (6) of `impls/__init__.py`. `impls.softmax_merge` adds sink and division.

m, l and the sum of (6) for the keys so far are kept in the outputs themselves. These stay in VMEM during all steps of a
sequence. As in `impls.splash_tpu.forward`, z and m are in units of log 2, l is kept separately for each lane until the
end, and m begins finite. No mask is applied where every query sees the whole block. With all this, four heads over 512
keys take 673 cycles for one query on v5e and 859 on 7x; without it, 1,011 and 1,001. Eight queries take 929 and 1,115
(compiler's schedule, libtpu 0.0.42.1, depth 128, bf16, eight query heads per key/value head).

The steps (`RaggedSteps`) are prefetched to scalar memory, and the grid is as long as they are. The
blocks of all sequences are one list, so the pipeline fetches the first block of the next sequence while the last one of
this sequence is computed.

The kernel reads a cache with heads before keys, `[B, K, S, .]`. A cache in that order is used as it is. A cache in the
contract's order, `[B, S, K, .]`, is transposed first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from impls.block_arithmetic import LN_2, make_shape, multiply_tiles
from impls.jax_compat import Interpret, Ref, Scalar, count_tpu_cores
from impls.pallas_tpu.tpu_tiles import EMPTY_MAXIMUM, repeat_lanes, sum_by_lane
from impls.ragged.ragged_plan import (
    Operands,
    RaggedPlan,
    compute_allowed,
    compute_logits,
    find_block_range,
    find_key_range,
)
from impls.softmax_merge import Part
from impls.varying_axes import find_varying_axes, mark_shapes_varying, mark_varying


class RaggedSteps(NamedTuple):
    """Grid steps of maximal length, of which the first `total` are run, and blocks per batch row; int32.

    There is a step for each block with a key of a sequence, one sequence after the other. A sequence without keys has
    one step, which writes an empty part. That step points to the block that is in VMEM already, so it fetches nothing.
    The lists are built on the device from the lengths, which may differ in every call.
    """

    total: jax.Array  # [], number of steps
    row: jax.Array  # [L], batch row
    kv_row: jax.Array  # [L], batch row of the block in VMEM
    kv_block: jax.Array  # [L], index of that block in its row
    blocks: jax.Array  # [B], number of blocks with a visible key


def build_steps(plan: RaggedPlan, lengths: jax.Array, positions: jax.Array, block: int) -> RaggedSteps:
    """Build the steps for `lengths` and `positions` `[B]`."""
    batch = lengths.shape[0]
    first, count = find_block_range(plan, lengths, positions, block)
    ends = jnp.cumsum(jnp.maximum(count, 1), dtype=jnp.int32)
    longest = batch * max(1, -(-plan.kv_length // block))
    number = jnp.arange(longest, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, number, side="right"), batch - 1).astype(jnp.int32)
    inside = number - (ends[row] - jnp.maximum(count[row], 1))
    computes = (inside < count[row]) & (number < ends[-1])
    # A step without keys points to the block that the step before fetched, or to the first block of all.
    latest = lax.cummax(jnp.where(computes, number, -1))
    held = jnp.where(latest < 0, jnp.argmax(computes).astype(jnp.int32), latest)
    some = computes.any()
    return RaggedSteps(
        total=ends[-1],
        row=row,
        kv_row=jnp.where(some, row[held], 0),
        kv_block=jnp.where(some, (first[row] + inside)[held], 0),
        blocks=count,
    )


LANES = 128
SUBLANES = 8
MAX_ROWS = 1024
"""Largest number of rows (query tokens times query heads per key/value head) whose logits fit VMEM."""

# Bytes for blocks, of the 16 MiB that a kernel may take by default. The rest is for values between loads and stores.
_VMEM_BUDGET = 8 * 2**20

Semantics = tuple[Literal["parallel", "arbitrary"], ...]
BuildSteps = Callable[[RaggedPlan, jax.Array, jax.Array, int], RaggedSteps]


def attend(
    plan: RaggedPlan,
    operands: Operands,
    *,
    block_kv: int,
    heads_first: bool = False,
    interpret: Interpret,
    schedule: BuildSteps = build_steps,
) -> Part:
    """Attend to every key that exists; the part has arrays `[B, K, R, .]`.

    Args:
      operands: arrays of the call; with `heads_first`, k and v are `[B, K, S, .]`.
      block_kv: keys per block, a multiple of 8; clipped to the cache.
      heads_first: whether the cache has heads before keys.
      schedule: function that builds the steps, `build_steps` or a replacement.
    """
    k, v = (x if heads_first else x.swapaxes(1, 2) for x in (operands.k, operands.v))
    batch, num_kv_heads, given, depth = operands.q.shape
    rows = -(-given // SUBLANES) * SUBLANES
    q = jnp.pad(operands.q, ((0, 0), (0, 0), (0, rows - given), (0, 0)))
    block = min(block_kv, plan.kv_length)
    heads = choose_num_heads(num_kv_heads, rows, block, (depth, v.shape[3]), q.dtype.itemsize)
    steps = schedule(plan, operands.lengths, operands.positions, block)
    scalars = (steps.row, steps.kv_row, steps.kv_block, steps.blocks, operands.lengths, operands.positions)
    scalars, (q, k, v) = mark_varying((scalars, (q, k, v)), find_varying_axes((scalars, q, k, v)))

    def of_row(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, heads, rows, width), lambda h, s, row, *_: (row[s], h, 0, 0))

    def of_block(width: int) -> pl.BlockSpec:
        def index(h: Scalar, s: Any, row: Scalar, kv_row: Scalar, kv_block: Scalar, *_: Any) -> tuple[Any, ...]:
            return kv_row[s], h, kv_block[s], 0

        return pl.BlockSpec((None, heads, block, width), index)

    widths = (v.shape[3], LANES, LANES)  # of out, max and sum
    semantics: Semantics = ("parallel", "arbitrary")
    found = Part(
        *pl.pallas_call(
            functools.partial(_kernel, plan),
            out_shape=mark_shapes_varying(
                [make_shape((batch, num_kv_heads, rows, width), jnp.float32) for width in widths], q
            ),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(scalars),
                grid=(num_kv_heads // heads, steps.total),
                in_specs=[of_row(depth), of_block(depth), of_block(v.shape[3])],
                out_specs=[of_row(width) for width in widths],
            ),
            compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
            interpret=interpret,
            name="ragged_decode",
        )(*scalars, q, k, v)
    )
    top = found.max[:, :, :given, :1]
    return Part(
        out=found.out[:, :, :given],
        max=jnp.where(top == EMPTY_MAXIMUM, -jnp.inf, top * jnp.float32(LN_2)),
        sum=found.sum[:, :, :given].sum(axis=-1, keepdims=True),
    )


def choose_num_heads(num_kv_heads: int, rows: int, block: int, depths: tuple[int, int], itemsize: int) -> int:
    """Choose the key/value heads per step: as many as fit VMEM, but some for each core that shares the call."""
    h, v = (-(-depth // LANES) * LANES for depth in depths)
    fetched = 2 * (block * (h + v) + rows * h) * itemsize
    kept = 2 * rows * (v + 2 * LANES) * 4
    between = 3 * rows * block * 4 + block * v * 4
    most = max(1, min(_VMEM_BUDGET // (fetched + kept + between), num_kv_heads // count_tpu_cores()))
    return max(n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0 and n <= most)


def _kernel(
    plan: RaggedPlan,
    row_ref: Ref,
    kv_row_ref: Ref,
    kv_block_ref: Ref,
    blocks_ref: Ref,
    lengths_ref: Ref,
    positions_ref: Ref,
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    out_ref: Ref,
    max_ref: Ref,
    sum_ref: Ref,
) -> None:
    step = pl.program_id(1)
    row = row_ref[step]
    kept = Part(out_ref, max_ref, sum_ref)
    opens = (step == 0) | (row_ref[jnp.maximum(step - 1, 0)] != row)
    start = kv_block_ref[step] * k_ref.shape[1]
    length, position = lengths_ref[row], positions_ref[row]
    pl.when(opens)(functools.partial(_clear_softmax, kept))
    pl.when(blocks_ref[row] > 0)(
        functools.partial(_add_block, plan, q_ref, k_ref, v_ref, kept, start=start, length=length, position=position)
    )


def _clear_softmax(kept: Part) -> None:
    """Initialise the online softmax, before any key."""
    kept.out[...] = jnp.zeros(kept.out.shape, jnp.float32)
    kept.max[...] = jnp.full(kept.max.shape, EMPTY_MAXIMUM, jnp.float32)
    kept.sum[...] = jnp.zeros(kept.sum.shape, jnp.float32)


def _add_block(
    plan: RaggedPlan, q_ref: Ref, k_ref: Ref, v_ref: Ref, kept: Part, *, start: Scalar, length: Scalar, position: Scalar
) -> None:
    """Add the keys of one block, beginning with key `start`, to the online softmax."""
    rows, block, last = q_ref.shape[1], k_ref.shape[1], position + (plan.q_length - 1)

    def seen_in_part() -> None:
        shape = (rows, block)
        i = jnp.full(shape, position, jnp.int32)
        if plan.q_length > 1:
            # Padding rows see the same keys as the last query. So they see no key that all real queries ignore.
            t = lax.div(lax.broadcasted_iota(jnp.int32, shape, 0), jnp.int32(plan.group))
            i = i + jnp.minimum(t, plan.q_length - 1)
        sees = compute_allowed(plan, length, i, start + lax.broadcasted_iota(jnp.int32, shape, 1))
        # Values that no query sees may be NaN, and 0 * NaN is not 0. The key ranges of consecutive queries have no gap.
        low, high = find_key_range(plan, length, position)[0], find_key_range(plan, length, last)[1]
        j = start + lax.broadcasted_iota(jnp.int32, v_ref.shape[1:], 0)
        dead = (j < low) | (j >= high)
        _add_heads(
            plan,
            (q_ref, k_ref, v_ref),
            kept,
            lambda z: jnp.where(sees, z, -jnp.inf),  # hidden pairs get -inf, equation (3)
            lambda v: jnp.where(dead, 0.0, v.astype(jnp.float32)).astype(v.dtype),
        )

    low, high = find_key_range(plan, length, last)[0], find_key_range(plan, length, position)[1]
    seen = (start >= low) & (start + block <= high)  # whether every query sees the whole block
    pl.when(seen)(functools.partial(_add_heads, plan, (q_ref, k_ref, v_ref), kept, lambda z: z, lambda v: v))
    pl.when(jnp.logical_not(seen))(seen_in_part)


def _add_heads(
    plan: RaggedPlan,
    given: tuple[Any, Any, Any],
    kept: Part,
    masked: Callable[[jax.Array], jax.Array],
    alive: Callable[[jax.Array], jax.Array],
) -> None:
    """Add a block for all heads, interleaved: for four heads and 512 keys, 859 cycles on 7x instead of 1,214."""
    q_ref, k_ref, v_ref = given
    heads, block = k_ref.shape[:2]
    every = range(heads)
    products = [multiply_tiles(q_ref[head], k_ref[head], (1, 1)) for head in every]  # [rows, block]
    z = [masked(compute_logits(plan, x, LN_2)) for x in products]  # logits with soft cap, equations (1) and (2)
    before = [kept.max[head] for head in every]  # [rows, LANES]
    top = [jnp.maximum(old, x.max(axis=-1, keepdims=True)) for old, x in zip(before, z, strict=True)]  # maximum (4)
    weights = [jnp.exp2(x - repeat_lanes(m, block)) for x, m in zip(z, top, strict=True)]  # [rows, block]
    decay = [jnp.exp2(old - m) for old, m in zip(before, top, strict=True)]
    values = [alive(v_ref[head]) for head in every]  # [block, V]
    added = [multiply_tiles(p.astype(v.dtype), v, (1, 0)) for p, v in zip(weights, values, strict=True)]
    for head in every:
        kept.max[head] = top[head]
        kept.sum[head] = kept.sum[head] * decay[head] + sum_by_lane(weights[head])  # sum of weights, equation (5)
        kept.out[head] = kept.out[head] * repeat_lanes(decay[head], added[head].shape[1]) + added[head]  # out (6)
