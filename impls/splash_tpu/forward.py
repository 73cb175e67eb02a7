"""Forward kernel: one pass over the steps of each query block, each step adding one block of keys to the softmax.

With (1) and (2) from `impls.splash_tpu.tiles`:

    (3)  z_ij = -inf, where i may not attend to j
    (4)  m_i = max(max_j z_ij, sink)
    (5)  l_i = sum_j exp(z_ij - m_i) + exp(sink - m_i)
    (6)  out_i = sum_j exp(z_ij - m_i) v_j / l_i
    (7)  logsumexp_i = m_i + log(l_i)

`maximum`, `total` and `acc` of `Scratch` are m, l and the sum of (6) for the keys so far, without the sink, which joins
at the end. A block that raises m multiplies the others by `decay = exp(old m - new m)`.

z, m and the sink are counted in units of log 2, and each exponential is a power of two: the scale of (1) takes up the
product that the exponential would need, in f32, and q stays as it is. (7) is counted in units of 1 again. So the
compiler's schedule of a full block of 512 by 512 has 977 cycles on v6e, and 1,057 with `exp`; 1,292 and 1,309 on v5e.

Sources: Milakov & Gimelshein 2018, arXiv:1805.02867 (running maximum and sum); Dao 2023, arXiv:2307.08691 (blocks,
normalisation once at the end).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from impls.splash_tpu.block_sizes import LANES
from impls.splash_tpu.call import Call
from impls.splash_tpu.launch import Inputs, Outputs, launch
from impls.splash_tpu.schedule import Steps
from impls.splash_tpu.tiles import (
    Masking,
    Step,
    across,
    allowed,
    column,
    logits_of,
    product,
    read,
    when,
    without_unseen,
)

_LOG_2 = math.log(2)


class Scratch(NamedTuple):
    """The softmax of the keys so far, f32. Maximum, in units of log 2, and total are the same in every lane."""

    maximum: Any  # [block_q, 128]
    total: Any  # [block_q, 128]
    acc: Any  # [block_q, V]
    q_ids: Any  # [block_q, 128] int32, none without segments


def forward(call: Call, steps: Steps, q_offset: Any, inputs: Inputs, outputs: Outputs) -> Outputs:
    """`out`, `logsumexp` and, if asked for, `max_logits`, on operands padded to whole blocks."""
    block_q = call.blocks.q

    def vmem(lanes: int, dtype: Any = jnp.float32) -> Any:
        return pltpu.VMEM((block_q, lanes), dtype)

    scratch = Scratch(
        maximum=vmem(LANES),
        total=vmem(LANES),
        acc=vmem(call.head_dim_v),
        q_ids=vmem(LANES, jnp.int32) if call.segmented else None,
    )
    return launch(call, functools.partial(_kernel, call), steps, q_offset, inputs, outputs, scratch)


def _kernel(call: Call, step: Step, q_offset: Any, inputs: Inputs, outputs: Outputs, scratch: Scratch) -> None:
    when(step.first)(lambda: _start(inputs, scratch))
    masking = Masking(step, q_offset, inputs.stored, scratch.q_ids, inputs.kv_ids)
    if call.kinds.full:
        when(step.computes, step.unmasked)(lambda: _add(call, inputs, scratch, masking, masked=False))
    if call.kinds.masked:
        when(step.computes, step.masked)(lambda: _add(call, inputs, scratch, masking, masked=True))
    when(step.last)(lambda: _finish(call, inputs, outputs, scratch))


def _start(inputs: Inputs, scratch: Scratch) -> None:
    """An empty softmax."""
    scratch.maximum[...] = jnp.full(scratch.maximum.shape, -jnp.inf, jnp.float32)
    scratch.total[...] = jnp.zeros(scratch.total.shape, jnp.float32)
    scratch.acc[...] = jnp.zeros(scratch.acc.shape, jnp.float32)
    if scratch.q_ids is not None:
        scratch.q_ids[...] = column(inputs.q_ids[...])


def _add(call: Call, inputs: Inputs, scratch: Scratch, masking: Masking, *, masked: bool) -> None:
    """Add the keys of one block to the running softmax."""
    layouts, size = call.plan.layouts, call.blocks.compute
    q, q_depth = read(inputs.q, layouts.q)
    for start in range(0, call.blocks.kv, size):
        k, k_depth = read(inputs.k, layouts.k, start, size)
        v, v_depth = read(inputs.v, layouts.v, start, size)
        logits, _ = logits_of(call, product(call, q, q_depth, k, k_depth), _LOG_2)  # (1), (2): [block_q, size]
        found = allowed(call, masking, start, masked=masked)
        if found is not None:
            logits = jnp.where(found, logits, -jnp.inf)  # (3)
        highest = logits.max(axis=-1, keepdims=True)
        before = scratch.maximum[...]
        maximum = jnp.maximum(before, highest)  # (4)
        shift = _finite(maximum)
        weights = jnp.exp2(logits - across(shift, size))
        decay = jnp.exp2(before - shift)
        scratch.maximum[...] = maximum
        scratch.total[...] = scratch.total[...] * decay + weights.sum(axis=-1, keepdims=True)  # (5)
        v = without_unseen(call, v, found, layouts.v)
        part = product(call, weights.astype(v.dtype), 1, v, 1 - v_depth)
        scratch.acc[...] = scratch.acc[...] * across(decay, call.head_dim_v) + part  # (6), not divided


def _finish(call: Call, inputs: Inputs, outputs: Outputs, scratch: Scratch) -> None:
    """Add the sink and normalise; queries that attended to nothing get zeros."""
    highest, total, acc = scratch.maximum[...], scratch.total[...], scratch.acc[...]
    maximum = highest
    if inputs.sinks is not None:
        sinks = inputs.sinks[...] * jnp.float32(1 / _LOG_2)
        maximum = jnp.maximum(highest, sinks)  # (4)
        shift = _finite(maximum)
        decay = jnp.exp2(highest - shift)
        total = total * decay + jnp.exp2(sinks - shift)  # (5)
        acc = acc * across(decay, call.head_dim_v)
    some = total > 0
    total = jnp.where(some, total, 1.0)
    value = jnp.float32(call.plan.mask_value)
    outputs.out[...] = (acc / across(total, call.head_dim_v)).astype(outputs.out.dtype)  # (6)
    outputs.logsumexp[...] = _row(jnp.where(some, maximum * jnp.float32(_LOG_2) + jnp.log(total), value))  # (7)
    if outputs.max_logits is not None:
        outputs.max_logits[...] = _row(jnp.where(highest == -jnp.inf, value, highest * jnp.float32(_LOG_2)))


def _row(x: jax.Array) -> jax.Array:
    """`[n, 128]`, the same in every lane, as a row `[1, n]`."""
    return x.T[:1]


def _finite(x: jax.Array) -> jax.Array:
    """-inf replaced by 0, so that `exp(-inf - x)` is 0 and not NaN."""
    return jnp.where(x == -jnp.inf, 0.0, x)
