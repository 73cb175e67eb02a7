"""Kernel of dk and dv, and fused with it that of dq: one pass over the steps of each key block.

With (1) and (2) from `impls.splash_tpu.splash_tiles`:

    (8)  p_ij = exp(z_ij - logsumexp_i)
    (9)  dv_j = sum_i p_ij dout_i
    (10) dp_ij = <dout_i, v_j>
    (12) dz_ij = p_ij (dp_ij - D_i + dlse_i)
    (13) dx_ij = dz_ij (1 - tanh(x_ij / soft_cap)^2)
    (14) dq_i = scale sum_j dx_ij k_j, if fused
    (15) dk_j = scale sum_i dx_ij q_i

`D - dlse` comes from `impls.splash_tpu.splash_passes`, as `row_sums`. Where a pair may not attend, p and dx are set to 0.
Tiles are `[keys, queries]`: so (9) and (15) are plain products, and a value for each query is a row. The query heads
that share a key/value head add up in the same scratch.

Fused, dq is summed in f32 in HBM. Each step copies its query block of dq to VMEM, adds to it, and copies it back. That
takes memory linear in the length; a partial dq for each key block would not. The block comes while the products of its
step are computed, and goes while those of the next step are: so there are two places for it. Steps of one key block
have different blocks of dq, and before the next key block every copy has ended.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from impls.splash_tpu.block_sizes import LANES
from impls.splash_tpu.diagonal_bands import BlockPart
from impls.splash_tpu.splash_launch import Inputs, Outputs, launch
from impls.splash_tpu.splash_plan import KernelCall
from impls.splash_tpu.splash_schedule import Steps
from impls.splash_tpu.splash_tiles import (
    MaskInputs,
    Step,
    add_block,
    compute_allowed,
    compute_logits,
    make_column,
    multiply,
    read_tile,
    when,
    zero_unseen_keys,
)


class Scratch(NamedTuple):
    """Sums so far, f32."""

    dk: Any  # [block_kv, H]
    dv: Any  # [block_kv, V]
    kv_ids: Any  # [block_kv, 128] int32, the same in every lane; none without segments
    dq: Any  # [2, block_q, H] on its way from HBM and back, none if not fused, as what follows
    copied_in: Any  # [2] semaphores of copies from HBM
    copied_out: Any  # [2] and to it
    num_added: Any  # [1] int32, blocks of dq so far, of this key block


def compute_dkv(call: KernelCall, steps: Steps, q_offset: Any, inputs: Inputs, outputs: Outputs) -> Outputs:
    """`dk [B * K, S, H]`, `dv [B * K, S, V]` and, fused, `dq [B * N, T, H]` in f32 without the scale."""
    blocks = call.blocks
    scratch = Scratch(
        dk=pltpu.VMEM((blocks.kv, call.head_dim), jnp.float32),
        dv=pltpu.VMEM((blocks.kv, call.head_dim_v), jnp.float32),
        kv_ids=pltpu.VMEM((blocks.kv, LANES), jnp.int32) if call.segmented else None,
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
    scratch.dk[...] = jnp.zeros(scratch.dk.shape, jnp.float32)
    scratch.dv[...] = jnp.zeros(scratch.dv.shape, jnp.float32)
    if scratch.num_added is not None:
        scratch.num_added[0] = 0
    if scratch.kv_ids is not None:
        scratch.kv_ids[...] = make_column(inputs.kv_ids[...])


def _add(
    call: KernelCall,
    inputs: Inputs,
    outputs: Outputs,
    scratch: Scratch,
    masking: MaskInputs,
    parts: tuple[BlockPart, ...],
) -> None:
    """Add what the queries of one block contribute."""
    layouts, of_queries = call.plan.layouts, []
    if call.fused:
        _start_fetch(call, masking.step, outputs, scratch)
    for part in parts:
        rows, dq = part.rows, None
        q, q_depth = read_tile(inputs.q, layouts.q, rows.start, part.size)
        do = inputs.do[rows, :]
        for keys in part.keys:
            own = slice(keys.start, keys.start + keys.size)
            k, k_depth = read_tile(inputs.k, layouts.k, keys.start, keys.size)
            v, v_depth = read_tile(inputs.v, layouts.v, keys.start, keys.size)
            logits, slope = compute_logits(call, multiply(call, k, k_depth, q, q_depth))  # (1), (2): [keys, rows]
            found = compute_allowed(call, masking, rows, keys)
            p = jnp.exp(logits - inputs.logsumexp[:, rows])  # (8)
            if found is not None:
                p = jnp.where(found, p, 0.0)
            scratch.dv[own, :] += multiply(call, p.astype(do.dtype), 1, do, 0)  # (9)
            dx = p * (multiply(call, v, v_depth, do, 1) - inputs.row_sums[:, rows])  # (10), (12)
            if slope is not None:
                dx = dx * slope  # (13)
            if found is not None:
                dx = jnp.where(found, dx, 0.0)
            dx = dx.astype(q.dtype)
            scratch.dk[own, :] += multiply(call, dx, 1, q, 1 - q_depth)  # (15), not scaled
            if call.fused:  # (14), not scaled
                added = multiply(call, dx, 0, zero_unseen_keys(call, k, found, layouts.k), 1 - k_depth)
                dq = added if dq is None else dq + added
        of_queries.append((rows, dq))
    if call.fused:
        _add_in_place(call, masking.step, outputs, scratch, of_queries)


def _copy_dq_in(call: KernelCall, step: Step, outputs: Outputs, scratch: Scratch, number: Any) -> Any:
    """The copy of the query block of dq from HBM to the place of the block of that number."""
    place = number % 2
    return pltpu.make_async_copy(_get_dq_block(call, step, outputs), scratch.dq.at[place], scratch.copied_in.at[place])


def _copy_dq_out(call: KernelCall, step: Step, outputs: Outputs, scratch: Scratch, number: Any) -> Any:
    """And back."""
    place = number % 2
    return pltpu.make_async_copy(scratch.dq.at[place], _get_dq_block(call, step, outputs), scratch.copied_out.at[place])


def _wait_for_copy_out(call: KernelCall, step: Step, outputs: Outputs, scratch: Scratch, number: Any) -> None:
    """Of an earlier step too: what is waited for hangs on the number and the size, not on which block it is."""
    _copy_dq_out(call, step, outputs, scratch, number).wait()


def _get_dq_block(call: KernelCall, step: Step, outputs: Outputs) -> Any:
    size = call.blocks.q
    return outputs.dq.at[step.row, pl.ds(pl.multiple_of(step.q * size, size), size)]


def _start_fetch(call: KernelCall, step: Step, outputs: Outputs, scratch: Scratch) -> None:
    """Begin to copy dq of the block from HBM, once the block before the last has left its place."""
    number = scratch.num_added[0]
    when(number >= 2)(functools.partial(_wait_for_copy_out, call, step, outputs, scratch, number))
    _copy_dq_in(call, step, outputs, scratch, number).start()


def _add_in_place(
    call: KernelCall, step: Step, outputs: Outputs, scratch: Scratch, added: list[tuple[slice, Any]]
) -> None:
    """Add dq of some queries of the block, which goes to VMEM and back once."""
    number = scratch.num_added[0]
    _copy_dq_in(call, step, outputs, scratch, number).wait()
    block = scratch.dq.at[number % 2]
    for rows, dq in added:
        block[rows, :] += dq
    _copy_dq_out(call, step, outputs, scratch, number).start()
    scratch.num_added[0] = number + 1


def _wait_for_copies(call: KernelCall, step: Step, outputs: Outputs, scratch: Scratch) -> None:
    """Wait for what the last two blocks of dq have on their way."""
    count = scratch.num_added[0]
    for number in (count - 1, count - 2):
        when(number >= 0)(functools.partial(_wait_for_copy_out, call, step, outputs, scratch, number))


def _finish(call: KernelCall, step: Step, outputs: Outputs, scratch: Scratch) -> None:
    outputs.dk[...] = (scratch.dk[...] * jnp.float32(call.scale)).astype(outputs.dk.dtype)  # (15)
    outputs.dv[...] = scratch.dv[...].astype(outputs.dv.dtype)
    if call.fused:  # while these were rounded, the last block of dq was on its way
        _wait_for_copies(call, step, outputs, scratch)
