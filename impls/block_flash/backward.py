"""Backward pass of block flash attention: one scan over the active pairs of blocks.

Probabilities are recomputed from `logsumexp`. This is algorithm 2 of Dao 2023, arXiv:2307.08691, extended by the
cotangent `dlse` of `logsumexp`, soft cap, bias and sinks. With the logits z of `impls.block_flash.operand_blocks`:

    (8)  p_ij = exp(z_ij - logsumexp_i)
    (9)  dv_j = sum_i keep_ij p_ij dout_i
    (10) dp_ij = keep_ij <dout_i, v_j>
    (11) D_i = <out_i, dout_i>
    (12) dz_ij = p_ij (dp_ij - D_i + dlse_i)
    (13) dx_ij = dz_ij (1 - tanh(x_ij / soft_cap)^2)
    (14) dq_i = scale sum_j dx_ij k_j
    (15) dk_j = scale sum_i dx_ij q_i
    (16) dbias = dx, summed over the axes along which the bias is broadcast
    (17) dsink = sum_i exp(sink - logsumexp_i) (dlse_i - D_i)

keep_ij is that of `impls.block_flash.forward`. The sums of (9) and (15) run over the query heads of the group too.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Shaped

from impls.block_arithmetic import compute_dsinks, multiply, put_block, replace_neg_inf, take_block
from impls.block_flash.block_schedule import BlockFlashPlan, PairIndices
from impls.block_flash.operand_blocks import (
    Operands,
    Pair,
    compute_pair,
    compute_unless_empty,
    cut_operands,
    cut_queries,
    cut_rows,
    join_keys,
    join_queries,
    locate_pair,
)
from impls.captured_arrays import CapturedGradients, make_zeros
from impls.varying_axes import find_varying_axes, mark_varying


class PairGradients(NamedTuple):
    """Gradient contributions of one pair of blocks, f32."""

    dq: Float32[Array, "B K G block_q H"]
    dk: Float32[Array, "B K block_kv H"]
    dv: Float32[Array, "B K block_kv V"]
    dx: Float32[Array, "B K G block_q block_kv"] | None  # gradient of the biased logits x; None without a bias
    captured: CapturedGradients = ()  # gradients of the arrays that `score_mod` captures


class _GradientSums(NamedTuple):
    """Gradients accumulated so far, f32, in the shapes of `Blocks`."""

    q: Float32[Array, "q_blocks B K G block_q H"]
    k: Float32[Array, "kv_blocks B K block_kv H"]
    v: Float32[Array, "kv_blocks B K block_kv V"]
    bias: Float32[Array, "b k g t s"] | None
    captured: CapturedGradients


def backward(
    plan: BlockFlashPlan,
    operands: Operands,
    out: Float[Array, "B T N V"],
    logsumexp: Float32[Array, "B N T"],
    d_out: Float[Array, "B T N V"],
    d_logsumexp: Float32[Array, "B N T"],
) -> Operands:
    """Compute gradients, of the operands' shapes and dtypes, for all but slopes, segment ids and selections."""
    blocks = cut_operands(plan, operands)
    shift = replace_neg_inf(logsumexp)
    # The row sums D - dlse, where D is equation (11).
    row_sums = jnp.einsum("btnv,btnv->bnt", out, d_out, precision="highest", preferred_element_type=jnp.float32)
    row_sums = row_sums - d_logsumexp
    d_outs, shifts, rows = cut_queries(plan, d_out), cut_rows(plan, shift), cut_rows(plan, row_sums)

    def parts(pair: PairIndices) -> PairGradients:
        block = compute_pair(plan, blocks, pair)
        found = compute_pair_gradients(
            block, take_block(d_outs, pair.q), take_block(shifts, pair.q), take_block(rows, pair.q)
        )
        return found if blocks.bias is not None else found._replace(dx=None)

    def step(sums: _GradientSums, pair: PairIndices) -> tuple[_GradientSums, None]:
        found = compute_unless_empty(plan, blocks, pair, functools.partial(parts, pair), nothing)
        return _GradientSums(
            q=put_block(sums.q, take_block(sums.q, pair.q) + found.dq, pair.q),
            k=put_block(sums.k, take_block(sums.k, pair.kv) + found.dk, pair.kv),
            v=put_block(sums.v, take_block(sums.v, pair.kv) + found.dv, pair.kv),
            bias=_add_bias(plan, sums.bias, found.dx, pair),
            captured=jax.tree.map(jnp.add, sums.captured, found.captured),
        ), None

    sums = _GradientSums(
        q=_make_zeros(blocks.q),
        k=_make_zeros(blocks.k),
        v=_make_zeros(blocks.v),
        bias=None if blocks.bias is None else _make_zeros(blocks.bias),
        captured=make_zeros(blocks.captured),
    )
    nothing = PairGradients(
        dq=jnp.zeros(blocks.q.shape[1:], jnp.float32),
        dk=jnp.zeros(blocks.k.shape[1:], jnp.float32),
        dv=jnp.zeros(blocks.v.shape[1:], jnp.float32),
        dx=None if blocks.bias is None else jnp.zeros((*blocks.q.shape[1:-1], plan.block_kv), jnp.float32),
        captured=make_zeros(blocks.captured),
    )
    sums, nothing = mark_varying((sums, nothing), find_varying_axes(operands))
    pairs = plan.schedule.pairs
    if len(pairs.q):
        sums, _ = lax.scan(step, sums, jax.tree.map(jnp.asarray, pairs))
    return Operands(
        q=join_queries(plan, (sums.q * plan.scale).astype(operands.q.dtype)),  # dq, equation (14)
        k=join_keys(plan, (sums.k * plan.scale).astype(operands.k.dtype)),  # dk, equation (15)
        v=join_keys(plan, sums.v.astype(operands.v.dtype)),
        bias=_finish_bias_gradient(sums.bias, operands.bias),
        alibi_slopes=None,
        sinks=compute_dsinks(operands.sinks, shift, row_sums),
        segment_ids=None,
        selected=None,
        captured=sums.captured,
    )


def compute_pair_gradients(
    block: Pair,
    do: Float[Array, "B K G block_q V"],
    shift: Float32[Array, "B K G block_q"],
    row_sums: Float32[Array, "B K G block_q"],
) -> PairGradients:
    """Compute the gradient contributions of one pair of blocks.

    `shift` is `logsumexp`, or 0 for rows that attend to nothing; `row_sums` is `D - dlse`, with `D` of equation (11).
    """
    dtype = block.q.dtype
    p = jnp.exp(block.logits - shift[..., None])  # probabilities, equation (8)
    kept = p if block.keep is None else p * block.keep
    dv = multiply("bkgts,bkgtv->bksv", kept.astype(dtype), do)  # dv, equation (9)
    dp = multiply("bkgtv,bksv->bkgts", do, block.v)  # dp, equation (10)
    if block.keep is not None:
        dp = dp * block.keep
    dx = p * (dp - row_sums[..., None])  # gradient of the logits, equation (12)
    if block.allowed is not None:
        dx = jnp.where(block.allowed, dx, 0.0)
    captured: CapturedGradients = ()
    if block.pull_back is not None:
        dx, captured = block.pull_back(dx)  # through the soft cap, equation (13), and `score_mod`
    rounded = dx.astype(dtype)
    dq = multiply("bkgts,bksh->bkgth", rounded, block.k)  # dq, equation (14), not yet scaled
    dk = multiply("bkgts,bkgth->bksh", rounded, block.q)  # dk, equation (15), not yet scaled
    return PairGradients(dq, dk, dv, dx, captured)


def _make_zeros(x: Shaped[Array, "*shape"]) -> Float32[Array, "*shape"]:
    return jnp.zeros(x.shape, jnp.float32)


def _add_bias(
    plan: BlockFlashPlan, total: jax.Array | None, dx: jax.Array | None, pair: PairIndices
) -> jax.Array | None:
    if total is None or dx is None:
        return None
    start, size = locate_pair(plan, total, pair)
    broadcast = tuple(axis for axis, (n, m) in enumerate(zip(size, dx.shape, strict=True)) if n < m)
    update = lax.dynamic_slice(total, start, size) + dx.sum(axis=broadcast, keepdims=True)  # dbias, equation (16)
    return lax.dynamic_update_slice(total, update, start)


def _finish_bias_gradient(total: jax.Array | None, bias: jax.Array | None) -> jax.Array | None:
    if total is None or bias is None:
        return None
    total = total.reshape(*bias.shape[:2], *total.shape[3:])
    return total[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype)
