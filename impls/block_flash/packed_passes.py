"""Both passes over a pack: for each block of queries, the blocks of keys that its sequences have.

The steps are those of `impls.block_flash.forward` and `impls.block_flash.backward`, and so are the numbers of formulas.
Dense operands have a schedule before any value is known. Here how many blocks of keys there are for a block of queries
is known at run time, so the loop over them is as long as the tables say, and a block in which no query has a key is
left out. Under `vmap` over tables both branches are computed, since a block may hold a pair for one and not for
another.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from impls.block_flash.backward import PairGradients, compute_dsinks, compute_pair_gradients
from impls.block_flash.forward import Outputs, RunningSoftmax, add_block, finish_softmax, replace_neg_inf, start_softmax
from impls.block_flash.operand_blocks import (
    Pair,
    compute_pair_logits,
    cut_keys,
    cut_queries,
    cut_rows,
    join_keys,
    join_queries,
    put_block,
    take_block,
)
from impls.block_flash.packed_key_ranges import PackedPlan, compute_allowed, compute_ranges, has_pair
from impls.packed_sequences import SequenceTables
from impls.varying_axes import find_varying_axes, mark_varying


class PackedOperands(NamedTuple):
    """What is differentiated."""

    q: jax.Array  # [total_q, N, H]
    k: jax.Array  # [total_kv, K, H]
    v: jax.Array  # [total_kv, K, V]
    sinks: jax.Array | None  # [N]


class _QueryBlocks(NamedTuple):
    """One block of queries, or all of them with the number of the block first."""

    q: jax.Array  # [1, K, G, block_q, H]
    low: jax.Array  # [block_q]
    high: jax.Array  # [block_q]
    first: jax.Array
    end: jax.Array


class _KeyBlocks(NamedTuple):
    """All keys and values in blocks, or what is like them."""

    k: jax.Array  # [kv blocks, 1, K, block_kv, H]
    v: jax.Array  # [kv blocks, 1, K, block_kv, V]


def forward(plan: PackedPlan, operands: PackedOperands, tables: SequenceTables) -> Outputs:
    """Attention of the pack, with a batch axis of 1. Memory beyond operands and outputs is linear in the lengths."""
    queries, keys = _cut_operands(plan, operands, tables)
    nothing = start_softmax(queries.q.shape[1:-1], operands.v.shape[-1])
    nothing = mark_varying(nothing, find_varying_axes((operands, tables)))

    def attend(mine: _QueryBlocks) -> RunningSoftmax:
        def add(kv_block: jax.Array, old: RunningSoftmax) -> RunningSoftmax:
            def computed() -> RunningSoftmax:
                return add_block(old, _compute_pair(plan, mine, keys, kv_block))

            new: RunningSoftmax = lax.cond(has_pair(plan, mine.low, mine.high, kv_block), computed, lambda: old)
            return new

        found: RunningSoftmax = lax.fori_loop(mine.first, mine.end, add, nothing)
        return found

    return finish_softmax(plan, lax.map(attend, queries), operands.sinks, operands.q.dtype)


def backward(
    plan: PackedPlan,
    operands: PackedOperands,
    tables: SequenceTables,
    out: jax.Array,
    logsumexp: jax.Array,
    d_out: jax.Array,
    d_logsumexp: jax.Array,
) -> PackedOperands:
    """Gradients of the operands, each in its shape and dtype; zero for tokens past the last sequence.

    `out` and `d_out` are `[1, total_q, N, V]`, `logsumexp` and `d_logsumexp` f32 `[1, N, total_q]`.
    """
    queries, keys = _cut_operands(plan, operands, tables)
    shift = replace_neg_inf(logsumexp)
    # (11)
    row_sums = jnp.einsum("btnv,btnv->bnt", out, d_out, precision="highest", preferred_element_type=jnp.float32)
    row_sums = row_sums - d_logsumexp
    nothing = PairGradients(
        dq=jnp.zeros(queries.q.shape[1:], jnp.float32),
        dk=jnp.zeros(keys.k.shape[1:], jnp.float32),
        dv=jnp.zeros(keys.v.shape[1:], jnp.float32),
        dx=None,
    )
    zeros = _KeyBlocks(*(jnp.zeros(x.shape, jnp.float32) for x in keys))
    nothing, zeros = mark_varying((nothing, zeros), find_varying_axes((operands, tables, d_out)))

    def with_queries(
        sums: _KeyBlocks, given: tuple[_QueryBlocks, jax.Array, jax.Array, jax.Array]
    ) -> tuple[_KeyBlocks, jax.Array]:
        mine, do, shift, rows = given

        def add(kv_block: jax.Array, found: tuple[_KeyBlocks, jax.Array]) -> tuple[_KeyBlocks, jax.Array]:
            sums, dq = found

            def computed() -> PairGradients:
                return compute_pair_gradients(_compute_pair(plan, mine, keys, kv_block), do, shift, rows)._replace(
                    dx=None
                )

            parts: PairGradients = lax.cond(has_pair(plan, mine.low, mine.high, kv_block), computed, lambda: nothing)
            dk, dv = take_block(sums.k, kv_block) + parts.dk, take_block(sums.v, kv_block) + parts.dv
            return _KeyBlocks(put_block(sums.k, dk, kv_block), put_block(sums.v, dv, kv_block)), dq + parts.dq

        total: tuple[_KeyBlocks, jax.Array] = lax.fori_loop(mine.first, mine.end, add, (sums, nothing.dq))
        return total

    given = queries, cut_queries(plan, d_out), cut_rows(plan, shift), cut_rows(plan, row_sums)
    sums, dq = lax.scan(with_queries, zeros, given)
    return PackedOperands(
        q=join_queries(plan, (dq * plan.scale).astype(operands.q.dtype))[0],  # (14)
        k=join_keys(plan, (sums.k * plan.scale).astype(operands.k.dtype))[0],  # (15)
        v=join_keys(plan, sums.v.astype(operands.v.dtype))[0],
        sinks=compute_dsinks(operands.sinks, shift, row_sums),
    )


def _cut_operands(
    plan: PackedPlan, operands: PackedOperands, tables: SequenceTables
) -> tuple[_QueryBlocks, _KeyBlocks]:
    ranges = compute_ranges(plan, tables)
    q = cut_queries(plan, operands.q[None])
    # A query of nobody may be NaN, and on the way back 0 * NaN is not 0.
    q = jnp.where((ranges.low < ranges.high)[:, None, None, None, :, None], q, jnp.zeros((), q.dtype))
    return _QueryBlocks(q, *ranges), _KeyBlocks(cut_keys(plan, operands.k[None]), cut_keys(plan, operands.v[None]))


def _compute_pair(plan: PackedPlan, mine: _QueryBlocks, keys: _KeyBlocks, kv_block: jax.Array) -> Pair:
    seen = compute_allowed(plan, mine.low, mine.high, kv_block)
    return compute_pair_logits(plan, mine.q, take_block(keys.k, kv_block), take_block(keys.v, kv_block), seen)
