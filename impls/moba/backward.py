"""Backward pass over the same blocks, probabilities recomputed from `logsumexp` (Dao 2023, arXiv:2307.08691).

With the logits z of `impls.moba.blocks`:

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

The gate only chooses, and gets no gradient. dk and dv of a bin are summed block after block. A row has one part of dq
for each of its slots; the part lies where the row's slot went (`Work.places`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from impls.block_flash.blocks import product, take
from impls.block_flash.forward import finite_or_zero
from impls.moba import tpu
from impls.moba.blocks import (
    Block,
    Lanes,
    Operands,
    Sums,
    bias_place,
    compute_block,
    from_bias_rows,
    from_bins,
    from_rows,
    lanes_of,
    rows_of,
)
from impls.moba.forward import put, slots
from impls.moba.plan import MobaPlan, Work
from impls.varying import varying_axes, varying_over

Array = jax.Array


def backward(
    plan: MobaPlan, operands: Operands, work: Work, out: Array, logsumexp: Array, d_out: Array, d_logsumexp: Array
) -> Operands:
    """Gradients of the operands, each in its operand's shape and dtype.

    `out` and `d_out` are `[B, T, N, V]`, `logsumexp` and `d_logsumexp` f32 `[B, N, T]`.
    """
    lanes = lanes_of(plan, operands)
    # (11)
    row_sums = jnp.einsum("btnv,btnv->bnt", out, d_out, precision="highest", preferred_element_type=jnp.float32)
    row_sums = row_sums - d_logsumexp
    logsumexp = finite_or_zero(logsumexp)  # of a row without weight, whose logits are all -inf
    make = tpu.sums if plan.backend == "tpu" else _sums
    sums = make(plan, lanes, work, rows_of(plan, d_out), logsumexp.reshape(-1), row_sums.reshape(-1))
    dq = slots(sums.q, work.places, 0).sum(axis=1) * plan.scale  # (14)
    return Operands(
        q=from_rows(plan, dq.astype(operands.q.dtype)),
        k=from_bins(plan, (sums.k * plan.scale).astype(operands.k.dtype)),  # (15)
        v=from_bins(plan, sums.v.astype(operands.v.dtype)),
        bias=_bias_gradient(plan, sums.bias, operands.bias),
        sinks=_sink_gradient(operands.sinks, logsumexp, row_sums),
    )


def _sums(plan: MobaPlan, lanes: Lanes, work: Work, d_outs: Array, lses: Array, sums_of_rows: Array) -> Sums:
    def step(number: Array, sums: Sums) -> Sums:
        block = compute_block(plan, lanes, work, number)
        dtype = block.q.dtype
        row = jnp.minimum(block.rows, plan.lanes * plan.rows - 1)  # rows to spare take any row: their p is zero
        do = d_outs[row]
        p = jnp.exp(block.logits - lses[row][:, None])  # (8)
        dp = product("rv,jv->rj", do, block.v)  # (10)
        dx = p * (dp - sums_of_rows[row][:, None])  # (12)
        if block.slope is not None:
            dx = dx * block.slope  # (13)
        rounded = dx.astype(dtype)
        dk = product("rj,rh->jh", rounded, block.q)  # (15), not scaled
        dv = product("rj,rv->jv", p.astype(dtype), do)  # (9)
        return Sums(
            q=put(sums.q, product("rj,jh->rh", rounded, block.k), number),  # (14), not scaled
            k=put(sums.k, take(sums.k, block.bin) + dk, block.bin),
            v=put(sums.v, take(sums.v, block.bin) + dv, block.bin),
            bias=None if sums.bias is None else _add_bias(plan, sums.bias, dx, block),
        )

    none = Sums(
        q=jnp.zeros((plan.most_blocks, plan.block_rows, lanes.q.shape[-1]), jnp.float32),
        k=jnp.zeros(lanes.k.shape, jnp.float32),
        v=jnp.zeros(lanes.v.shape, jnp.float32),
        bias=None if lanes.bias is None else jnp.zeros(lanes.bias.shape, jnp.float32),
    )
    none = varying_over(none, varying_axes((lanes, work, d_outs)))
    sums: Sums = lax.fori_loop(jnp.zeros_like(work.in_use), work.in_use, step, none)
    return sums


def _add_bias(plan: MobaPlan, total: Array, dx: Array, block: Block) -> Array:
    """`dx [r, chunk]` added where the bias of its rows came from; rows of one bias row add up."""
    added = dx if total.shape[2] > 1 or dx.shape[1] == 1 else dx.sum(axis=1, keepdims=True)
    return total.at[bias_place(plan, total, block.rows, block.bin)].add(added)  # (16)


def _bias_gradient(plan: MobaPlan, total: Array | None, bias: Array | None) -> Array | None:
    if total is None or bias is None:
        return None
    return from_bias_rows(plan, total).astype(bias.dtype)


def _sink_gradient(sinks: Array | None, logsumexp: Array, row_sums: Array) -> Array | None:
    """Gradient `[N]`; `row_sums [B, N, T]` is `D - dlse`."""
    if sinks is None:
        return None
    p = jnp.exp(sinks.astype(jnp.float32)[None, :, None] - logsumexp)
    return -(p * row_sums).sum(axis=(0, 2)).astype(sinks.dtype)  # (17)
