"""Forward pass of block flash attention: one scan over the active pairs of blocks, which updates an online softmax.

From the logits z of `impls.block_flash.operand_blocks`:

    (4)  m_i = max(max_j z_ij, sink)
    (5)  l_i = sum_j exp(z_ij - m_i) + exp(sink - m_i)
    (6)  out_i = sum_j keep_ij exp(z_ij - m_i) v_j / l_i
    (7)  logsumexp_i = m_i + log(l_i)

keep_ij is 0 where dropout drops the weight and 1 / (1 - rate) elsewhere; without dropout it is 1.

The fields `maximum`, `total` and `out` of `RunningSoftmax` are m, l and the sum in equation (6) over the keys visited
so far, without the sink. A block that raises m multiplies the old l and the old sum by `decay = exp(old m - new m)`.

Sources: Milakov & Gimelshein 2018, arXiv:1805.02867 (running maximum and sum); Dao et al. 2022, arXiv:2205.14135 and
Dao 2023, arXiv:2307.08691 (blocks, normalisation once at the end).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from impls.block_arithmetic import multiply, put_block, replace_neg_inf, take_block
from impls.block_flash.block_schedule import BlockFlashPlan, FlashSizes, PairIndices
from impls.block_flash.operand_blocks import (
    Operands,
    Pair,
    compute_pair,
    compute_unless_empty,
    cut_operands,
    join_queries,
    join_rows,
)
from impls.varying_axes import find_varying_axes, mark_varying


class Outputs(NamedTuple):
    """Results of the forward pass."""

    out: Float[Array, "B T N V"]
    logsumexp: Float32[Array, "B N T"]
    max_logits: Float32[Array, "B N T"]


class RunningSoftmax(NamedTuple):
    """The online softmax over the keys visited so far, f32."""

    maximum: Float32[Array, "q_blocks B K G block_q"]
    total: Float32[Array, "q_blocks B K G block_q"]
    out: Float32[Array, "q_blocks B K G block_q V"]


def forward(plan: BlockFlashPlan, operands: Operands) -> Outputs:
    """Compute attention. Memory beyond operands and outputs is linear in the lengths."""
    blocks = cut_operands(plan, operands)
    rows = blocks.q.shape[:-1]

    def add(old: RunningSoftmax, pair: PairIndices) -> RunningSoftmax:
        return add_block(old, compute_pair(plan, blocks, pair))

    def step(running: RunningSoftmax, pair: PairIndices) -> tuple[RunningSoftmax, None]:
        old = RunningSoftmax(*(take_block(x, pair.q) for x in running))
        new = compute_unless_empty(plan, blocks, pair, functools.partial(add, old, pair), old)
        return RunningSoftmax(*(put_block(x, y, pair.q) for x, y in zip(running, new, strict=True))), None

    running = mark_varying(start_softmax(rows, blocks.v.shape[-1]), find_varying_axes(operands))
    pairs = plan.schedule.pairs
    if len(pairs.q):
        running, _ = lax.scan(step, running, jax.tree.map(jnp.asarray, pairs))
    return finish_softmax(plan, running, operands.sinks, operands.q.dtype)


def start_softmax(rows: tuple[int, ...], depth: int) -> RunningSoftmax:
    """Create the online softmax before any key is visited, for rows of shape `rows` and values of this depth."""
    return RunningSoftmax(
        maximum=jnp.full(rows, -jnp.inf, jnp.float32),
        total=jnp.zeros(rows, jnp.float32),
        out=jnp.zeros((*rows, depth), jnp.float32),
    )


def add_block(old: RunningSoftmax, block: Pair) -> RunningSoftmax:
    """Update the online softmax of a block of queries `[B, K, G, block_q]` with one more block of keys."""
    maximum = jnp.maximum(old.maximum, block.logits.max(axis=-1))  # the maximum m, equation (4)
    shift = replace_neg_inf(maximum)
    weights = jnp.exp(block.logits - shift[..., None])
    decay = jnp.exp(old.maximum - shift)
    kept = weights if block.keep is None else weights * block.keep
    update = multiply("bkgts,bksv->bkgtv", kept.astype(block.v.dtype), block.v)
    return RunningSoftmax(
        maximum,
        total=old.total * decay + weights.sum(axis=-1),  # the softmax sum l, equation (5)
        out=old.out * decay[..., None] + update,  # the sum in equation (6), not yet divided by l
    )


def finish_softmax(plan: FlashSizes, running: RunningSoftmax, sinks: Float[Array, " N"] | None, dtype: Any) -> Outputs:
    """Add the sinks to the maxima m and the sums l, then divide; `out` is converted to `dtype`."""
    maximum, total, out = running
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, 1, plan.num_kv_heads, -1, 1)
        maximum = jnp.maximum(maximum, sink)  # the maximum m, equation (4)
        shift = replace_neg_inf(maximum)
        decay = jnp.exp(running.maximum - shift)
        total = total * decay + jnp.exp(sink - shift)  # the softmax sum l, equation (5)
        out = out * decay[..., None]
    has_keys = total != 0
    total = jnp.where(has_keys, total, 1.0)
    logsumexp = jnp.where(has_keys, maximum + jnp.log(total), -jnp.inf)  # logsumexp, equation (7)
    return Outputs(
        out=join_queries(plan, (out / total[..., None]).astype(dtype)),  # out, equation (6)
        logsumexp=join_rows(plan, logsumexp),
        max_logits=join_rows(plan, running.maximum),
    )
