"""Forward kernel: one pass over the steps of each query block, each adding one block of keys to an online softmax.

From the logits z, equations (1) and (2) of `impls.splash_tpu.splash_tiles`, the kernel computes:

    (3)  z_ij = -inf, where i may not attend to j
    (4)  m_i = max(max_j z_ij, sink)
    (5)  l_i = sum_j exp(z_ij - m_i) + exp(sink - m_i)
    (6)  out_i = sum_j keep_ij exp(z_ij - m_i) v_j / l_i
    (7)  logsumexp_i = m_i + log(l_i)

keep_ij is 0 where dropout drops the weight and 1 / (1 - rate) elsewhere; without dropout it is 1. The factor
1 / (1 - rate) multiplies sums, not weights.

`maximum`, `total` and `acc` of `Scratch` are m, l and the sum of (6) for the keys so far, without the sink, which joins
at the end. A block that raises m multiplies the others by `decay = exp(old m - new m)`.

z, m and the sink are in units of log 2, so that each exponential is a power of two. The scale of (1) absorbs the factor
in f32; q is unchanged. (7) converts back to natural units.

The design keeps the matrix unit busy. Cycles are those of the compiler's schedules of a full block of 1024 by 1024, 512
keys at a time, at depth 128 (libtpu 0.0.42.1). The products alone take 4,096 cycles on v5e and 2,048 on v6e:

- l is kept separately for each lane until the end. So a step only adds registers and moves nothing across lanes.
- m, l and the sum of (6) are values between the steps of a block, not references. m starts finite, so that exponentials
  need no test for -inf. This takes 4,387 cycles on v5e and 2,721 on v6e; without, 4,900 and 3,111.
- A block is computed in interleaved parts of 256 or 512 queries. The products of each step are issued before the
  softmax of the previous one. The visible part of a 1024 by 1024 block under a window of 1024 keys takes 2,826 cycles
  in parts of 256 on v5e and 2,004 in parts of 512 on v6e; without, 3,612 and 2,362.
- Longer blocks overlap more products with exponentials. Hidden parts of long masked blocks are skipped
  (`impls.splash_tpu.splash_schedule`).
- A row is extracted as the diagonal of a tile, since a transpose occupies the unit that moves lanes. The end of a block
  of 1024 queries takes 1,017 cycles on v5e; with a transpose, 1,470.

Sources: Milakov & Gimelshein 2018, arXiv:1805.02867 (running maximum and sum); Dao 2023, arXiv:2307.08691 (blocks,
normalisation once at the end).
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from impls.block_arithmetic import LN_2
from impls.pallas_tpu.tpu_tiles import EMPTY_MAXIMUM, LANES, repeat_lanes, sum_by_lane
from impls.splash_tpu.splash_launch import Inputs, Outputs, launch
from impls.splash_tpu.splash_plan import KernelCall
from impls.splash_tpu.splash_schedule import BlockPart, KeySpan, Steps
from impls.splash_tpu.splash_tiles import (
    MaskInputs,
    Step,
    add_block,
    compute_allowed,
    compute_logits,
    drop_weights,
    load_query_columns,
    multiply,
    read_tile,
    when,
    zero_unseen_keys,
)


class Scratch(NamedTuple):
    """The online softmax over the keys visited so far, f32, and values per query. None where not needed."""

    maximum: Any  # [block_q, 128], m in units of log 2, the same in every lane
    total: Any  # [block_q, 128], the sum over lanes is l
    acc: Any  # [block_q, V], undivided sum of weighted values
    q_ids: Any  # [block_q, 128] int32
    low: Any  # [block_q, 128] int32, the first key that each query sees, if masks are key ranges
    high: Any  # [block_q, 128] int32, one past the last key that each query sees
    q_term: Any  # [block_q, 128] int32, if weights are dropped
    q_factor: Any  # [block_q, 128] int32


def forward(call: KernelCall, steps: Steps, q_offset: Any, inputs: Inputs, outputs: Outputs) -> Outputs:
    """Compute `out`, `logsumexp` and, if in `outputs`, `max_logits`, of operands padded to whole blocks."""
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
        q_term=vmem(LANES, jnp.int32) if call.plan.dropout_rate is not None else None,
        q_factor=vmem(LANES, jnp.int32) if call.plan.dropout_rate is not None else None,
    )
    return launch(call, functools.partial(_kernel, call), steps, q_offset, inputs, outputs, scratch)


def _kernel(call: KernelCall, step: Step, q_offset: Any, inputs: Inputs, outputs: Outputs, scratch: Scratch) -> None:
    when(step.first)(lambda: _start(inputs, scratch))
    masking = MaskInputs(step, q_offset, inputs.stored, scratch.q_ids, inputs.kv_ids, scratch.low, scratch.high)
    add_block(call, step, functools.partial(_add, call, inputs, scratch, masking))
    when(step.last)(lambda: _finish(call, inputs, outputs, scratch))


def _start(inputs: Inputs, scratch: Scratch) -> None:
    """Initialise the online softmax, before any key."""
    scratch.maximum[...] = jnp.full(scratch.maximum.shape, EMPTY_MAXIMUM, jnp.float32)
    scratch.total[...] = jnp.zeros(scratch.total.shape, jnp.float32)
    scratch.acc[...] = jnp.zeros(scratch.acc.shape, jnp.float32)
    load_query_columns(inputs, scratch)


def _add(call: KernelCall, inputs: Inputs, scratch: Scratch, masking: MaskInputs, parts: tuple[BlockPart, ...]) -> None:
    """Add the keys of one block to the online softmax.

    The parts are interleaved, and the products of each step are issued before the softmax of the previous step. So the
    matrix unit overlaps with the other units.
    """
    layouts = call.plan.layouts

    def compute_products(at: int, keys: KeySpan) -> jax.Array:
        part = parts[at]
        q, q_depth = read_tile(inputs.q, layouts.q, part.rows.start, part.size)  # [rows, H], or [H, rows]
        k, k_depth = read_tile(inputs.k, layouts.k, keys.start, keys.size)  # [keys, H], or [H, keys]
        return multiply(call, q, q_depth, k, k_depth)  # [rows, keys]

    # Values, not references, between the steps: the compiler does not reorder stores and loads.
    softmax = [tuple(ref[part.rows, :] for ref in (scratch.maximum, scratch.total, scratch.acc)) for part in parts]
    rounds = itertools.zip_longest(*(part.keys for part in parts))
    steps = [(at, keys) for one_round in rounds for at, keys in enumerate(one_round) if keys is not None]
    next_products = compute_products(*steps[0])
    for number, (at, keys) in enumerate(steps):
        products, (maximum, total, acc) = next_products, softmax[at]  # [rows, keys]; [rows, 128] twice, [rows, V]
        if number + 1 < len(steps):
            next_products = compute_products(*steps[number + 1])
        logits, _ = compute_logits(call, products, LN_2)  # logits with soft cap, equations (1) and (2)
        found = compute_allowed(call, masking, parts[at].rows, keys)
        if found is not None:
            logits = jnp.where(found, logits, -jnp.inf)  # hidden pairs get -inf, equation (3)
        before, maximum = maximum, jnp.maximum(maximum, logits.max(axis=-1, keepdims=True))  # maximum, equation (4)
        weights = jnp.exp2(logits - repeat_lanes(maximum, keys.size))  # [rows, keys]
        decay = jnp.exp2(before - maximum)  # [rows, 128]
        total = total * decay + sum_by_lane(weights)  # sum of weights, equation (5)
        v, v_depth = read_tile(inputs.v, layouts.v, keys.start, keys.size)  # [keys, V], or [V, keys]
        v = zero_unseen_keys(call, v, found, layouts.v)
        (weights,) = drop_weights(call, inputs, scratch, parts[at].rows, keys, weights)
        added = multiply(call, weights.astype(v.dtype), 1, v, 1 - v_depth)  # [rows, V]
        acc = acc * repeat_lanes(decay, call.head_dim_v) + added  # weighted sum of values, eq. (6), not yet divided
        softmax[at] = maximum, total, acc
    for part, (maximum, total, acc) in zip(parts, softmax, strict=True):
        rows = part.rows
        scratch.maximum[rows, :], scratch.total[rows, :], scratch.acc[rows, :] = maximum, total, acc


def _finish(call: KernelCall, inputs: Inputs, outputs: Outputs, scratch: Scratch) -> None:
    """Add the sink and normalise. Queries that attended to nothing get zeros."""
    highest, acc = scratch.maximum[...], scratch.acc[...]  # [block_q, 128], [block_q, V]
    total = jnp.broadcast_to(scratch.total[...].sum(axis=-1, keepdims=True), highest.shape)  # [block_q, 128]
    maximum = highest
    if inputs.sinks is not None:
        # The largest sinks would overflow here. They take all the weight, whatever they are.
        sinks = jnp.minimum(inputs.sinks[...] * jnp.float32(1 / LN_2), np.finfo(np.float32).max)
        maximum = jnp.maximum(highest, sinks)  # maximum, equation (4)
        decay = jnp.exp2(highest - maximum)
        total = total * decay + jnp.exp2(sinks - maximum)  # sum of weights, equation (5)
        acc = acc * repeat_lanes(decay, call.head_dim_v)
    if call.keep_factor != 1:
        acc = acc * jnp.float32(call.keep_factor)
    outputs.out[...] = (acc / repeat_lanes(jnp.where(total > 0, total, 1.0), call.head_dim_v)).astype(
        outputs.out.dtype
    )  # out, equation (6)
    # Values per query leave as rows, which take an eighth of the registers.
    tile = (LANES, LANES)
    row = functools.partial(
        _extract_row, lax.broadcasted_iota(jnp.int32, tile, 0) == lax.broadcasted_iota(jnp.int32, tile, 1)
    )
    total, alone = row(total), maximum is highest  # [1, block_q], as the other rows below
    highest = row(highest)
    maximum = highest if alone else row(maximum)
    has_keys = total > 0
    value = jnp.float32(call.plan.mask_value)
    logsumexp = maximum * jnp.float32(LN_2) + jnp.log(jnp.where(has_keys, total, 1.0))  # logsumexp, equation (7)
    if inputs.sinks is not None:
        logsumexp = jnp.maximum(logsumexp, inputs.sinks[...][:, :1])  # exact for sinks that take all the weight
    outputs.logsumexp[...] = jnp.where(has_keys, logsumexp, value)
    if outputs.max_logits is not None:
        outputs.max_logits[...] = jnp.where(highest == EMPTY_MAXIMUM, value, highest * jnp.float32(LN_2))


def _extract_row(diagonal: jax.Array, x: jax.Array) -> jax.Array:
    """Turn `[n, 128]`, the same in every lane, into a row `[1, n]`: sum each tile's diagonal, which moves no lanes."""
    tiles = (x[at : at + LANES] for at in range(0, x.shape[0], LANES))
    return jnp.concatenate([jnp.where(diagonal, t, 0.0).sum(axis=0, keepdims=True) for t in tiles], axis=1)
