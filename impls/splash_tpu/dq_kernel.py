"""Kernel of dq: one pass over the steps of each query block, probabilities recomputed from `logsumexp`.

Dao 2023, arXiv:2307.08691, section 3.1.2, with the cotangent `dlse` of `logsumexp`, soft cap and sinks. From the logits
z, equations (1) and (2) of `impls.splash_tpu.splash_tiles`, the kernel computes:

    (8)  p_ij = exp(z_ij - logsumexp_i)
    (10) dp_ij = keep_ij <dout_i, v_j>
    (12) dz_ij = p_ij (dp_ij - D_i + dlse_i)
    (13) dx_ij = dz_ij (1 - tanh(x_ij / soft_cap)^2)
    (14) dq_i = scale sum_j dx_ij k_j

keep_ij is that of `impls.splash_tpu.forward`; its factor 1 / (1 - rate) multiplies the sum of (14). `D - dlse`, divided
by that factor, comes from `impls.splash_tpu.splash_kernel`, as `row_sums`. Where a pair may not attend, dx is set to 0.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from impls.pallas_tpu.tpu_tiles import LANES, make_column, repeat_lanes
from impls.splash_tpu.splash_launch import Inputs, Outputs, launch
from impls.splash_tpu.splash_plan import KernelCall
from impls.splash_tpu.splash_schedule import BlockPart, Steps
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
    """The kernel's accumulator, and values per query as columns that are alike in every lane; None if not needed."""

    dq: Any  # [block_q, H] f32
    logsumexp: Any  # [block_q, 128] f32
    row_sums: Any  # [block_q, 128] f32
    q_ids: Any  # [block_q, 128] int32
    low: Any  # [block_q, 128] int32, the first key that each query sees, if masks are key ranges
    high: Any  # [block_q, 128] int32, one past the last key that each query sees
    q_term: Any  # [block_q, 128] int32, if weights are dropped
    q_factor: Any  # [block_q, 128] int32


def compute_dq(call: KernelCall, steps: Steps, q_offset: Any, inputs: Inputs, outputs: Outputs) -> Outputs:
    """Compute `dq [B * N, T, H]` of operands padded to whole blocks."""
    block_q = call.blocks.q

    def columns(dtype: Any) -> Any:
        return pltpu.VMEM((block_q, LANES), dtype)

    scratch = Scratch(
        dq=pltpu.VMEM((block_q, call.head_dim), jnp.float32),
        logsumexp=columns(jnp.float32),
        row_sums=columns(jnp.float32),
        q_ids=columns(jnp.int32) if call.segmented else None,
        low=columns(jnp.int32) if call.ranged else None,
        high=columns(jnp.int32) if call.ranged else None,
        q_term=columns(jnp.int32) if call.plan.dropout_rate is not None else None,
        q_factor=columns(jnp.int32) if call.plan.dropout_rate is not None else None,
    )
    return launch(call, functools.partial(_kernel, call), steps, q_offset, inputs, outputs, scratch)


def _kernel(call: KernelCall, step: Step, q_offset: Any, inputs: Inputs, outputs: Outputs, scratch: Scratch) -> None:
    when(step.first)(lambda: _start(inputs, scratch))
    masking = MaskInputs(step, q_offset, inputs.stored, scratch.q_ids, inputs.kv_ids, scratch.low, scratch.high)
    add_block(call, step, functools.partial(_add, call, inputs, scratch, masking))
    when(step.last)(lambda: _finish(call, outputs, scratch))


def _start(inputs: Inputs, scratch: Scratch) -> None:
    scratch.dq[...] = jnp.zeros(scratch.dq.shape, jnp.float32)  # [block_q, H]
    scratch.logsumexp[...] = make_column(inputs.logsumexp[...])  # [1, block_q] to [block_q, 128]
    scratch.row_sums[...] = make_column(inputs.row_sums[...])
    load_query_columns(inputs, scratch)


def _add(call: KernelCall, inputs: Inputs, scratch: Scratch, masking: MaskInputs, parts: tuple[BlockPart, ...]) -> None:
    """Add the contributions of one block of keys."""
    layouts = call.plan.layouts
    for part in parts:
        rows = part.rows
        q, q_depth = read_tile(inputs.q, layouts.q, rows.start, part.size)  # [rows, H], or [H, rows]
        do = inputs.do[rows, :]  # [rows, V]
        for keys in part.keys:
            k, k_depth = read_tile(inputs.k, layouts.k, keys.start, keys.size)  # [keys, H], or [H, keys]
            v, v_depth = read_tile(inputs.v, layouts.v, keys.start, keys.size)  # [keys, V], or [V, keys]
            logits, slope = compute_logits(call, multiply(call, q, q_depth, k, k_depth))  # z (1), (2): [rows, keys]
            found = compute_allowed(call, masking, rows, keys)
            p = jnp.exp(logits - repeat_lanes(scratch.logsumexp[rows, :], keys.size))  # probabilities, equation (8)
            (dp,) = drop_weights(
                call, inputs, scratch, rows, keys, multiply(call, do, 1, v, v_depth)
            )  # dp, equation (10)
            # dz, equation (12)
            dx = p * (dp - repeat_lanes(scratch.row_sums[rows, :], keys.size))
            if slope is not None:
                dx = dx * slope  # dx, equation (13)  # [rows, keys]
            if found is not None:
                dx = jnp.where(found, dx, 0.0)
            k = zero_unseen_keys(call, k, found, layouts.k)
            scratch.dq[rows, :] += multiply(call, dx.astype(k.dtype), 1, k, 1 - k_depth)  # dq, eq. (14), not yet scaled


def _finish(call: KernelCall, outputs: Outputs, scratch: Scratch) -> None:
    outputs.dq[...] = (scratch.dq[...] * jnp.float32(call.scale * call.keep_factor)).astype(
        outputs.dq.dtype
    )  # dq, equation (14)
