"""Forward pass of MoBA: attend from each block of query rows to its chunk of keys, then merge the parts of each row.

From the logits z of `impls.moba.moba_blocks`:

    (4)  m_i = max(max_j z_ij, sink)
    (5)  l_i = sum_j exp(z_ij - m_i) + exp(sink - m_i)
    (6)  out_i = sum_j exp(z_ij - m_i) v_j / l_i
    (7)  logsumexp_i = m_i + log(l_i)

First each block computes m, l and the sum in equation (6) over the keys of its chunk (`BlockSoftmax`). Then each row
merges the parts of its chunks: the l and the sum of a part are multiplied by `exp(m of the part - m_i)`, and the sink
is added.

Parts of a softmax over disjoint keys are merged by their maxima and sums (Milakov & Gimelshein 2018,
arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135), as MoBA's authors do it (arXiv:2502.13189, algorithm 1).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from impls.block_arithmetic import multiply, put_block, replace_neg_inf
from impls.moba import moba_tpu
from impls.moba.moba_blocks import BlockSoftmax, Lanes, Operands, compute_block, restore_rows, split_lanes
from impls.moba.moba_plan import MobaPlan, MobaWork
from impls.varying_axes import find_varying_axes, mark_varying

Array = jax.Array


class Outputs(NamedTuple):
    """Results of the forward pass."""

    out: Array  # [B, T, N, V]
    logsumexp: Array  # [B, N, T] f32
    max_logits: Array  # [B, N, T] f32


def forward(plan: MobaPlan, operands: Operands, work: MobaWork) -> Outputs:
    """Compute attention from the blocks in `work`. Memory beyond operands and outputs is linear in the lengths."""
    parts = (moba_tpu.compute_parts if plan.backend == "tpu" else _compute_parts)(
        plan, split_lanes(plan, operands), work
    )
    maximum, total, out = (gather_slots(x, work.places, fill) for x, fill in zip(parts, (-jnp.inf, 0, 0), strict=True))
    top = maximum.max(axis=-1)  # the maxima m without the sink, equation (4), [L R]
    pivot = top
    if operands.sinks is not None:
        sink = _broadcast_sinks(plan, operands.sinks)
        pivot = jnp.maximum(top, sink)  # the maximum m, equation (4)
    # A bias of -inf may leave a row without any weight: its output is zero, and its logsumexp -inf.
    some = pivot != -jnp.inf
    pivot = replace_neg_inf(pivot)
    weight = jnp.exp(maximum - pivot[:, None])
    total = (weight * total).sum(axis=-1)  # the softmax sum l, equation (5)
    if operands.sinks is not None:
        total = total + jnp.exp(sink - pivot)
    total = jnp.where(some, total, 1.0)
    out = (weight[..., None] * out).sum(axis=1) / total[:, None]  # out, equation (6)
    rows = (plan.batch, plan.num_q_heads, plan.q_length)
    return Outputs(
        out=restore_rows(plan, out.astype(operands.q.dtype)),
        logsumexp=jnp.where(some, pivot + jnp.log(total), -jnp.inf).reshape(rows),  # logsumexp, equation (7)
        max_logits=top.reshape(rows),
    )


def _compute_parts(plan: MobaPlan, lanes: Lanes, work: MobaWork) -> BlockSoftmax:
    def step(number: Array, parts: BlockSoftmax) -> BlockSoftmax:
        block = compute_block(plan, lanes, work, number)
        maximum = block.logits.max(axis=-1)  # m of the chunk, equation (4)
        weights = jnp.exp(block.logits - replace_neg_inf(maximum)[:, None])
        out = multiply("rj,jv->rv", weights.astype(block.v.dtype), block.v)  # the sum in equation (6) over the chunk
        part = BlockSoftmax(maximum, weights.sum(axis=-1), out)  # l of the chunk, equation (5)
        return BlockSoftmax(*(put_block(x, y, number) for x, y in zip(parts, part, strict=True)))

    shape = (plan.most_blocks, plan.block_rows)
    none = BlockSoftmax(*(jnp.zeros(s, jnp.float32) for s in (shape, shape, (*shape, lanes.v.shape[-1]))))
    none = mark_varying(none, find_varying_axes((lanes, work)))
    parts: BlockSoftmax = lax.fori_loop(jnp.zeros_like(work.in_use), work.in_use, step, none)
    return parts


def gather_slots(x: Array, places: Array, fill: float | int) -> Array:
    """Gather each row's slots `[L R, slots, ...]` from `x [blocks, block_rows, ...]`; empty slots get `fill`."""
    flat = x.reshape(-1, *x.shape[2:])
    found: Array = flat.at[places].get(mode="fill", fill_value=fill)
    return found


def _broadcast_sinks(plan: MobaPlan, sinks: Array) -> Array:
    """Broadcast sinks `[N]` to rows `[L R]`."""
    by_head = jnp.repeat(sinks.astype(jnp.float32), plan.q_length)
    return jnp.tile(by_head, plan.batch)
