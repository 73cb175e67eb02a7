"""Kernel of dk and dv, optionally fused with dq: one pass over the steps of each key block.

From the logits z, equations (1) and (2) of `impls.splash_tpu.splash_tiles`, the kernel computes:

    (8)  p_ij = exp(z_ij - logsumexp_i)
    (9)  dv_j = sum_i keep_ij p_ij dout_i
    (10) dp_ij = keep_ij <dout_i, v_j>
    (12) dz_ij = p_ij (dp_ij - D_i + dlse_i)
    (13) dx_ij = dz_ij (1 - tanh(x_ij / soft_cap)^2)
    (14) dq_i = scale sum_j dx_ij k_j, if fused
    (15) dk_j = scale sum_i dx_ij q_i

keep_ij is that of `impls.splash_tpu.forward`; its factor 1 / (1 - rate) multiplies the sums of (9), (14) and (15).
`D - dlse`, divided by that factor, comes from `impls.splash_tpu.splash_kernel` as `row_sums`. Where a pair may not
attend, p and dx are set to 0. Tiles are `[keys, queries]`. So (9) and (15) are plain products, and values per query are
rows. The query heads that share a key/value head add to the same scratch.

When fused, dq is summed in f32 in HBM. Each step copies its query block of dq to VMEM, adds to it, and copies it back.
This takes memory linear in the length; a partial dq per key block would not. The copy in overlaps with the products of
the step, and the copy out with the products of the next step. So there are two buffers. The steps of one key block have
different blocks of dq, and all copies end before the next key block begins.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from impls.jax_compat import Scalar
from impls.pallas_tpu.tpu_tiles import LANES, make_column
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
    multiply,
    read_tile,
    when,
    zero_unseen_keys,
)


class Scratch(NamedTuple):
    """Scratch of the kernel: accumulators in f32, and the buffers of dq. Fields are None where not needed."""

    dk: Any  # [block_kv, H]
    dv: Any  # [block_kv, V]
    kv_ids: Any  # [block_kv, 128] int32, the same in every lane
    kv_term: Any  # [block_kv, 128] int32, if weights are dropped
    kv_factor: Any  # [block_kv, 128] int32
    dq: Any  # [2, block_q, H], buffers of blocks copied from HBM and back, if fused
    copied_in: Any  # [2] semaphores of copies from HBM, if fused
    copied_out: Any  # [2] semaphores of copies to HBM, if fused
    num_added: Any  # [1] int32, number of dq blocks that this key block has updated so far, if fused


def compute_dkv(call: KernelCall, steps: Steps, q_offset: Any, inputs: Inputs, outputs: Outputs) -> Outputs:
    """Compute `dk [B * K, S, H]` and `dv [B * K, S, V]`; if fused also `dq [B * N, T, H]` in f32, not scaled."""
    blocks = call.blocks
    scratch = Scratch(
        dk=pltpu.VMEM((blocks.kv, call.head_dim), jnp.float32),
        dv=pltpu.VMEM((blocks.kv, call.head_dim_v), jnp.float32),
        kv_ids=pltpu.VMEM((blocks.kv, LANES), jnp.int32) if call.segmented else None,
        kv_term=pltpu.VMEM((blocks.kv, LANES), jnp.int32) if call.plan.dropout_rate is not None else None,
        kv_factor=pltpu.VMEM((blocks.kv, LANES), jnp.int32) if call.plan.dropout_rate is not None else None,
        dq=pltpu.VMEM((2, blocks.q, call.head_dim), jnp.float32) if call.fused else None,
        copied_in=pltpu.SemaphoreType.DMA((2,)) if call.fused else None,
        copied_out=pltpu.SemaphoreType.DMA((2,)) if call.fused else None,
        num_added=pltpu.SMEM((1,), jnp.int32) if call.fused else None,
    )
    return launch(call, functools.partial(_kernel, call), steps, q_offset, inputs, outputs, scratch)


def _kernel(call: KernelCall, step: Step, q_offset: Any, inputs: Inputs, outputs: Outputs, scratch: Scratch) -> None:
    when(step.first)(lambda: _start(inputs, scratch))
    masking = MaskInputs(step, q_offset, inputs.stored, scratch.kv_ids, inputs.q_ids, inputs.low, inputs.high)
    add_block(call, step, functools.partial(_add, call, inputs, outputs, scratch, masking))
    when(step.last)(lambda: _finish(call, step, outputs, scratch))


def _start(inputs: Inputs, scratch: Scratch) -> None:
    scratch.dk[...] = jnp.zeros(scratch.dk.shape, jnp.float32)  # [block_kv, H]
    scratch.dv[...] = jnp.zeros(scratch.dv.shape, jnp.float32)  # [block_kv, V]
    if scratch.num_added is not None:
        scratch.num_added[0] = 0
    for name in ("kv_ids", "kv_term", "kv_factor"):
        if (columns := getattr(scratch, name)) is not None:
            columns[...] = make_column(getattr(inputs, name)[...])


def _add(
    call: KernelCall,
    inputs: Inputs,
    outputs: Outputs,
    scratch: Scratch,
    masking: MaskInputs,
    parts: tuple[BlockPart, ...],
) -> None:
    """Add the contributions of one block of queries."""
    layouts, dq_parts = call.plan.layouts, []
    if call.fused:
        _start_fetch(call, masking.step, outputs, scratch)
    for part in parts:
        rows, dq = part.rows, None
        q, q_depth = read_tile(inputs.q, layouts.q, rows.start, part.size)  # [rows, H], or [H, rows]
        do = inputs.do[rows, :]  # [rows, V]
        for keys in part.keys:
            own = slice(keys.start, keys.start + keys.size)
            k, k_depth = read_tile(inputs.k, layouts.k, keys.start, keys.size)  # [keys, H], or [H, keys]
            v, v_depth = read_tile(inputs.v, layouts.v, keys.start, keys.size)  # [keys, V], or [V, keys]
            logits, slope = compute_logits(call, multiply(call, k, k_depth, q, q_depth))  # z (1), (2): [keys, rows]
            found = compute_allowed(call, masking, rows, keys)
            p = jnp.exp(logits - inputs.logsumexp[:, rows])  # probabilities, equation (8)
            if found is not None:
                p = jnp.where(found, p, 0.0)
            dp = multiply(call, v, v_depth, do, 1)
            weights, dp = drop_weights(call, inputs, scratch, rows, keys, p, dp)  # dp, equation (10)
            scratch.dv[own, :] += multiply(call, weights.astype(do.dtype), 1, do, 0)  # dv, equation (9)
            dx = p * (dp - inputs.row_sums[:, rows])  # dz, equation (12)
            if slope is not None:
                dx = dx * slope  # dx, equation (13)
            if found is not None:
                dx = jnp.where(found, dx, 0.0)
            dx = dx.astype(q.dtype)  # [keys, rows]
            scratch.dk[own, :] += multiply(call, dx, 1, q, 1 - q_depth)  # dk, equation (15), not yet scaled
            if call.fused:  # dq, equation (14), not yet scaled
                added = multiply(call, dx, 0, zero_unseen_keys(call, k, found, layouts.k), 1 - k_depth)
                dq = added if dq is None else dq + added
        dq_parts.append((rows, dq))
    if call.fused:
        _add_in_place(call, masking.step, outputs, scratch, dq_parts)


def _copy_dq_in(call: KernelCall, step: Step, outputs: Outputs, scratch: Scratch, number: Scalar) -> Any:
    """Make the copy of a query block of dq from HBM to the buffer of block `number`."""
    buffer = number % 2
    return pltpu.make_async_copy(
        _get_dq_block(call, step, outputs), scratch.dq.at[buffer], scratch.copied_in.at[buffer]
    )


def _copy_dq_out(call: KernelCall, step: Step, outputs: Outputs, scratch: Scratch, number: Scalar) -> Any:
    """Make the copy of a query block of dq from the buffer of block `number` back to HBM."""
    buffer = number % 2
    return pltpu.make_async_copy(
        scratch.dq.at[buffer], _get_dq_block(call, step, outputs), scratch.copied_out.at[buffer]
    )


def _wait_for_copy_out(call: KernelCall, step: Step, outputs: Outputs, scratch: Scratch, number: Scalar) -> None:
    """Wait for a copy out, possibly of an earlier step: waiting depends on the buffer and the size only."""
    _copy_dq_out(call, step, outputs, scratch, number).wait()


def _get_dq_block(call: KernelCall, step: Step, outputs: Outputs) -> Any:
    size = call.blocks.q
    return outputs.dq.at[step.row, pl.ds(pl.multiple_of(step.q * size, size), size)]


def _start_fetch(call: KernelCall, step: Step, outputs: Outputs, scratch: Scratch) -> None:
    """Start to copy the block of dq from HBM, once the block that last used the buffer has been copied out."""
    number = scratch.num_added[0]
    when(number >= 2)(functools.partial(_wait_for_copy_out, call, step, outputs, scratch, number))
    _copy_dq_in(call, step, outputs, scratch, number).start()


def _add_in_place(
    call: KernelCall, step: Step, outputs: Outputs, scratch: Scratch, added: list[tuple[slice, Any]]
) -> None:
    """Add the parts of dq to the block in VMEM, then start to copy it back."""
    number = scratch.num_added[0]
    _copy_dq_in(call, step, outputs, scratch, number).wait()
    block = scratch.dq.at[number % 2]
    for rows, dq in added:
        block[rows, :] += dq
    _copy_dq_out(call, step, outputs, scratch, number).start()
    scratch.num_added[0] = number + 1


def _wait_for_copies(call: KernelCall, step: Step, outputs: Outputs, scratch: Scratch) -> None:
    """Wait for the copies out of the last two blocks of dq."""
    count = scratch.num_added[0]
    for number in (count - 1, count - 2):
        when(number >= 0)(functools.partial(_wait_for_copy_out, call, step, outputs, scratch, number))


def _finish(call: KernelCall, step: Step, outputs: Outputs, scratch: Scratch) -> None:
    outputs.dk[...] = (scratch.dk[...] * jnp.float32(call.scale * call.keep_factor)).astype(
        outputs.dk.dtype
    )  # dk, equation (15)
    dv = scratch.dv[...]
    if call.keep_factor != 1:
        dv = dv * jnp.float32(call.keep_factor)
    outputs.dv[...] = dv.astype(outputs.dv.dtype)  # dv, equation (9)
    if call.fused:  # the last copy of dq overlapped with this rounding
        _wait_for_copies(call, step, outputs, scratch)
