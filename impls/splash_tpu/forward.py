"""Forward kernel: one pass over the steps of each query block, each step adding one block of keys to the softmax.

With (1) and (2) from `impls.splash_tpu.splash_tiles`:

    (3)  z_ij = -inf, where i may not attend to j
    (4)  m_i = max(max_j z_ij, sink)
    (5)  l_i = sum_j exp(z_ij - m_i) + exp(sink - m_i)
    (6)  out_i = sum_j exp(z_ij - m_i) v_j / l_i
    (7)  logsumexp_i = m_i + log(l_i)

`maximum`, `total` and `acc` of `Scratch` are m, l and the sum of (6) for the keys so far, without the sink, which joins
at the end. A block that raises m multiplies the others by `decay = exp(old m - new m)`.

z, m and the sink are counted in units of log 2, and each exponential is a power of two: the scale of (1) takes up the
product that the exponential would need, in f32, and q stays as it is. (7) is counted in units of 1 again.

What keeps the matrix unit waiting least, by the compiler's schedules of a full block of 1024 by 1024, 512 keys at a
time, at depth 128 (libtpu 0.0.42.1). Its products alone take 4,096 cycles on v5e and 2,048 on v6e:

- l is kept for each lane by itself until the end, so that a step adds registers and moves nothing across lanes.
- m, l and the sum of (6) are values from one step of computing to the next, not references, and m begins finite, so
  that exponentials need no test for -inf: 4,387 cycles on v5e and 2,721 on v6e, where there were 4,900 and 3,111.
- A block is computed in parts of 256 or 512 queries, which take turns, and the products of each step of computing stand
  before the softmax of the one before. What a window of 1024 keys leaves of a block of 1024 by 1024 takes 2,826 cycles
  in parts of 256 on v5e and 2,004 in parts of 512 on v6e, where there were 3,612 and 2,362.
- The longer a block, the more of its products run under the exponentials of others. Of masked blocks that long what is
  hidden is left out (`impls.splash_tpu.diagonal_bands`).
- What leaves as a row is the diagonal of a tile: a transpose takes the unit that moves lanes, and so the end of a block
  of 1024 queries took 1,470 cycles on v5e, and takes 1,017.

Sources: Milakov & Gimelshein 2018, arXiv:1805.02867 (running maximum and sum); Dao 2023, arXiv:2307.08691 (blocks,
normalisation once at the end).
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from impls.splash_tpu.block_sizes import LANES
from impls.splash_tpu.diagonal_bands import BlockPart, KeySpan
from impls.splash_tpu.splash_launch import Inputs, Outputs, launch
from impls.splash_tpu.splash_plan import KernelCall
from impls.splash_tpu.splash_schedule import Steps
from impls.splash_tpu.splash_tiles import (
    EMPTY_MAXIMUM,
    LOG_2,
    MaskInputs,
    Step,
    add_block,
    compute_allowed,
    compute_logits,
    load_query_columns,
    multiply,
    read_tile,
    repeat_lanes,
    sum_by_lane,
    when,
    zero_unseen_keys,
)


class Scratch(NamedTuple):
    """The softmax of the keys so far, f32."""

    maximum: Any  # [block_q, 128] in units of log 2, the same in every lane
    total: Any  # [block_q, 128], whose lanes add up to the total
    acc: Any  # [block_q, V]
    q_ids: Any  # [block_q, 128] int32, none without segments
    low: Any  # [block_q, 128] int32, the first key that a query sees, none where masks are no such ranges
    high: Any  # [block_q, 128] int32, one past the last


def forward(call: KernelCall, steps: Steps, q_offset: Any, inputs: Inputs, outputs: Outputs) -> Outputs:
    """`out`, `logsumexp` and, if asked for, `max_logits`, on operands padded to whole blocks."""
    block_q = call.blocks.q

    def vmem(lanes: int, dtype: Any = jnp.float32) -> Any:
        return pltpu.VMEM((block_q, lanes), dtype)

    scratch = Scratch(
        maximum=vmem(LANES),
        total=vmem(LANES),
        acc=vmem(call.head_dim_v),
        q_ids=vmem(LANES, jnp.int32) if call.segmented else None,
        low=vmem(LANES, jnp.int32) if call.ranged else None,
        high=vmem(LANES, jnp.int32) if call.ranged else None,
    )
    return launch(call, functools.partial(_kernel, call), steps, q_offset, inputs, outputs, scratch)


def _kernel(call: KernelCall, step: Step, q_offset: Any, inputs: Inputs, outputs: Outputs, scratch: Scratch) -> None:
    when(step.first)(lambda: _start(inputs, scratch))
    masking = MaskInputs(step, q_offset, inputs.stored, scratch.q_ids, inputs.kv_ids, scratch.low, scratch.high)
    add_block(call, step, functools.partial(_add, call, inputs, scratch, masking))
    when(step.last)(lambda: _finish(call, inputs, outputs, scratch))


def _start(inputs: Inputs, scratch: Scratch) -> None:
    """An empty softmax."""
    scratch.maximum[...] = jnp.full(scratch.maximum.shape, EMPTY_MAXIMUM, jnp.float32)
    scratch.total[...] = jnp.zeros(scratch.total.shape, jnp.float32)
    scratch.acc[...] = jnp.zeros(scratch.acc.shape, jnp.float32)
    load_query_columns(inputs, scratch)


def _add(call: KernelCall, inputs: Inputs, scratch: Scratch, masking: MaskInputs, parts: tuple[BlockPart, ...]) -> None:
    """Add the keys of one block to the running softmax.

    Its steps of computing go from part to part, and the products of each are there before the softmax of the one before
    begins: so the matrix unit works while others do.
    """
    layouts = call.plan.layouts

    def products_of(at: int, keys: KeySpan) -> jax.Array:
        part = parts[at]
        q, q_depth = read_tile(inputs.q, layouts.q, part.rows.start, part.size)
        k, k_depth = read_tile(inputs.k, layouts.k, keys.start, keys.size)
        return multiply(call, q, q_depth, k, k_depth)  # [rows, keys]

    # Values and not references between the steps of computing: the compiler does not reorder what it stores and loads.
    softmax = [tuple(ref[part.rows, :] for ref in (scratch.maximum, scratch.total, scratch.acc)) for part in parts]
    turns = itertools.zip_longest(*(part.keys for part in parts))
    steps = [(at, keys) for turn in turns for at, keys in enumerate(turn) if keys is not None]
    coming = products_of(*steps[0])
    for number, (at, keys) in enumerate(steps):
        products, (maximum, total, acc) = coming, softmax[at]
        if number + 1 < len(steps):
            coming = products_of(*steps[number + 1])
        logits, _ = compute_logits(call, products, LOG_2)  # (1), (2)
        found = compute_allowed(call, masking, parts[at].rows, keys)
        if found is not None:
            logits = jnp.where(found, logits, -jnp.inf)  # (3)
        before, maximum = maximum, jnp.maximum(maximum, logits.max(axis=-1, keepdims=True))  # (4)
        weights = jnp.exp2(logits - repeat_lanes(maximum, keys.size))
        decay = jnp.exp2(before - maximum)
        total = total * decay + sum_by_lane(weights)  # (5)
        v, v_depth = read_tile(inputs.v, layouts.v, keys.start, keys.size)
        v = zero_unseen_keys(call, v, found, layouts.v)
        added = multiply(call, weights.astype(v.dtype), 1, v, 1 - v_depth)
        acc = acc * repeat_lanes(decay, call.head_dim_v) + added  # (6), not divided
        softmax[at] = maximum, total, acc
    for part, (maximum, total, acc) in zip(parts, softmax, strict=True):
        rows = part.rows
        scratch.maximum[rows, :], scratch.total[rows, :], scratch.acc[rows, :] = maximum, total, acc


def _finish(call: KernelCall, inputs: Inputs, outputs: Outputs, scratch: Scratch) -> None:
    """Add the sink and normalise; queries that attended to nothing get zeros."""
    highest, acc = scratch.maximum[...], scratch.acc[...]
    total = jnp.broadcast_to(scratch.total[...].sum(axis=-1, keepdims=True), highest.shape)
    maximum = highest
    if inputs.sinks is not None:
        sinks = inputs.sinks[...] * jnp.float32(1 / LOG_2)
        maximum = jnp.maximum(highest, sinks)  # (4)
        decay = jnp.exp2(highest - maximum)
        total = total * decay + jnp.exp2(sinks - maximum)  # (5)
        acc = acc * repeat_lanes(decay, call.head_dim_v)
    outputs.out[...] = (acc / repeat_lanes(jnp.where(total > 0, total, 1.0), call.head_dim_v)).astype(
        outputs.out.dtype
    )  # (6)
    # As rows, which take an eighth of the registers.
    tile = (LANES, LANES)
    row = functools.partial(
        _extract_row, lax.broadcasted_iota(jnp.int32, tile, 0) == lax.broadcasted_iota(jnp.int32, tile, 1)
    )
    total, alone = row(total), maximum is highest
    highest = row(highest)
    maximum = highest if alone else row(maximum)
    some = total > 0
    value = jnp.float32(call.plan.mask_value)
    logsumexp = maximum * jnp.float32(LOG_2) + jnp.log(jnp.where(some, total, 1.0))  # (7)
    outputs.logsumexp[...] = jnp.where(some, logsumexp, value)
    if outputs.max_logits is not None:
        outputs.max_logits[...] = jnp.where(highest == EMPTY_MAXIMUM, value, highest * jnp.float32(LOG_2))


def _extract_row(diagonal: jax.Array, x: jax.Array) -> jax.Array:
    """`[n, 128]`, the same in every lane, as a row `[1, n]`: its diagonal, which takes no unit that moves lanes."""
    tiles = (x[at : at + LANES] for at in range(0, x.shape[0], LANES))
    return jnp.concatenate([jnp.where(diagonal, t, 0.0).sum(axis=0, keepdims=True) for t in tiles], axis=1)
