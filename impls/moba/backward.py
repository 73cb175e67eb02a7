"""Backward pass of mixture of block attention (MoBA), over the same blocks as the forward pass.

Probabilities are recomputed from `logsumexp` (Dao 2023, arXiv:2307.08691). The logits x before the
soft cap and z after it are those of `impls.moba.moba_blocks`, and dlse is the cotangent of `logsumexp`:

    (8)  p_ij = exp(z_ij - logsumexp_i)
    (9)  dv_j = sum_i p_ij dout_i
    (10) dp_ij = <dout_i, v_j>
    (11) D_i = <out_i, dout_i>
    (12) dz_ij = p_ij (dp_ij - D_i + dlse_i)
    (13) dx_ij = dz_ij (1 - tanh(x_ij / soft_cap)^2)
    (14) dq_i = scale sum_j dx_ij k_j
    (15) dk_j = scale sum_i dx_ij q_i
    (16) dbias = dx, summed over the axes along which the bias is broadcast
    (17) dsink = sum_i exp(sink - logsumexp_i) (dlse_i - D_i)

The gate only selects chunks, and gets no gradient. The computation visits one block of queries after another; all
queries of a block selected the same chunk of keys (`impls.moba.moba_plan`). Each block adds to dk and dv of its chunk.
A query gets a part of dq from each chunk that it selected. The parts are stored by block, and summed at the end by
their index in `MobaWork.places`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from impls.block_arithmetic import compute_dsinks, multiply, put_block, replace_neg_inf, take_block
from impls.moba import moba_tpu
from impls.moba.forward import gather_slots
from impls.moba.moba_blocks import (
    GradientSums,
    Lanes,
    Operands,
    RowBlock,
    compute_block,
    flatten_rows,
    join_bins,
    locate_bias,
    restore_bias,
    restore_rows,
    split_lanes,
)
from impls.moba.moba_plan import MobaPlan, MobaWork
from impls.varying_axes import find_varying_axes, mark_varying

Array = jax.Array


def backward(
    plan: MobaPlan, operands: Operands, work: MobaWork, out: Array, logsumexp: Array, d_out: Array, d_logsumexp: Array
) -> Operands:
    """Compute the gradient of every operand, in the operand's shape and dtype.

    `out` and `d_out` are `[B, T, N, V]`, `logsumexp` and `d_logsumexp` f32 `[B, N, T]`.
    """
    lanes = split_lanes(plan, operands)
    # The row sums D - dlse, where D is equation (11).
    row_sums = jnp.einsum("btnv,btnv->bnt", out, d_out, precision="highest", preferred_element_type=jnp.float32)
    row_sums = row_sums - d_logsumexp
    logsumexp = replace_neg_inf(logsumexp)  # logsumexp is -inf in rows whose logits are all -inf
    make = moba_tpu.sum_gradients if plan.backend == "tpu" else _sum_gradients
    sums = make(plan, lanes, work, flatten_rows(plan, d_out), logsumexp.reshape(-1), row_sums.reshape(-1))
    dq = gather_slots(sums.q, work.places, 0).sum(axis=1) * plan.scale  # dq, equation (14)
    return Operands(
        q=restore_rows(plan, dq.astype(operands.q.dtype)),
        k=join_bins(plan, (sums.k * plan.scale).astype(operands.k.dtype)),  # dk, equation (15)
        v=join_bins(plan, sums.v.astype(operands.v.dtype)),
        bias=_finish_bias_gradient(plan, sums.bias, operands.bias),
        sinks=compute_dsinks(operands.sinks, logsumexp, row_sums),
    )


def _sum_gradients(
    plan: MobaPlan, lanes: Lanes, work: MobaWork, d_outs: Array, lses: Array, sums_of_rows: Array
) -> GradientSums:
    def step(number: Array, sums: GradientSums) -> GradientSums:
        block = compute_block(plan, lanes, work, number)
        dtype = block.q.dtype
        row = jnp.minimum(
            block.rows, plan.lanes * plan.rows - 1
        )  # padding rows may read any row, since their p is zero
        do = d_outs[row]
        p = jnp.exp(block.logits - lses[row][:, None])  # probabilities, equation (8)
        dp = multiply("rv,jv->rj", do, block.v)  # dp, equation (10)
        dx = p * (dp - sums_of_rows[row][:, None])  # gradient of the logits, equation (12)
        if block.slope is not None:
            dx = dx * block.slope  # through the soft cap, equation (13)
        rounded = dx.astype(dtype)
        dk = multiply("rj,rh->jh", rounded, block.q)  # dk, equation (15), not yet scaled
        dv = multiply("rj,rv->jv", p.astype(dtype), do)  # dv, equation (9)
        return GradientSums(
            q=put_block(sums.q, multiply("rj,jh->rh", rounded, block.k), number),  # dq, equation (14), not yet scaled
            k=put_block(sums.k, take_block(sums.k, block.bin) + dk, block.bin),
            v=put_block(sums.v, take_block(sums.v, block.bin) + dv, block.bin),
            bias=None if sums.bias is None else _add_bias(plan, sums.bias, dx, block),
        )

    none = GradientSums(
        q=jnp.zeros((plan.most_blocks, plan.block_rows, lanes.q.shape[-1]), jnp.float32),
        k=jnp.zeros(lanes.k.shape, jnp.float32),
        v=jnp.zeros(lanes.v.shape, jnp.float32),
        bias=None if lanes.bias is None else jnp.zeros(lanes.bias.shape, jnp.float32),
    )
    none = mark_varying(none, find_varying_axes((lanes, work, d_outs)))
    sums: GradientSums = lax.fori_loop(jnp.zeros_like(work.in_use), work.in_use, step, none)
    return sums


def _add_bias(plan: MobaPlan, total: Array, dx: Array, block: RowBlock) -> Array:
    """Add `dx [r, chunk]` to the gradients of the bias rows that the block read. Rows of one bias row are summed."""
    added = dx if total.shape[2] > 1 or dx.shape[1] == 1 else dx.sum(axis=1, keepdims=True)
    return total.at[locate_bias(plan, total, block.rows, block.bin)].add(added)  # dbias, equation (16)


def _finish_bias_gradient(plan: MobaPlan, total: Array | None, bias: Array | None) -> Array | None:
    if total is None or bias is None:
        return None
    return restore_bias(plan, total).astype(bias.dtype)
