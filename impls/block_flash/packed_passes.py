"""Forward and backward pass over packed sequences: each block of queries visits the key blocks of its sequences.

The steps and the numbers of the formulas are those of `impls.block_flash.forward` and `impls.block_flash.backward`.
Dense operands have a static schedule. For packed operands, the range of key blocks of each query block is only known at
run time. The loop runs over that range and skips blocks in which no query sees a key. Under `vmap` over tables, skipped
blocks are computed too, since a block may be empty for only some of the tables.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from impls.block_arithmetic import compute_dsinks, put_block, replace_neg_inf, take_block
from impls.block_flash.backward import PairGradients, compute_pair_gradients
from impls.block_flash.forward import Outputs, RunningSoftmax, add_block, finish_softmax, start_softmax
from impls.block_flash.operand_blocks import (
    Pair,
    compute_pair_logits,
    cut_keys,
    cut_queries,
    cut_rows,
    join_keys,
    join_queries,
)
from impls.block_flash.packed_key_ranges import PackedPlan, compute_allowed, compute_ranges, has_pair
from impls.packed_sequences import SequenceTables
from impls.varying_axes import find_varying_axes, mark_varying


class PackedOperands(NamedTuple):
    """The differentiable operands of a packed call."""

    q: Float[Array, "total_q N H"]
    k: Float[Array, "total_kv K H"]
    v: Float[Array, "total_kv K V"]
    sinks: Float[Array, " N"] | None


class _QueryBlocks(NamedTuple):
    """One block of queries with its key ranges (`KeyRanges`), or all blocks with the block index as first axis."""

    q: Float[Array, "1 K G block_q H"]
    low: Int32[Array, " block_q"]
    high: Int32[Array, " block_q"]
    first: Int32[Array, ""]  # first block of keys to visit
    end: Int32[Array, ""]  # one past the last block of keys to visit


class _KeyBlocks(NamedTuple):
    """All keys and values split into blocks, or their gradients in the same shapes."""

    k: Float[Array, "kv_blocks 1 K block_kv H"]
    v: Float[Array, "kv_blocks 1 K block_kv V"]


def forward(plan: PackedPlan, operands: PackedOperands, tables: SequenceTables) -> Outputs:
    """Compute attention over packed sequences. Results have a batch axis of size 1.

    Memory beyond operands and outputs is linear in the lengths.
    """
    queries, keys = _cut_operands(plan, operands, tables)
    nothing = start_softmax(queries.q.shape[1:-1], operands.v.shape[-1])
    nothing = mark_varying(nothing, find_varying_axes((operands, tables)))

    def attend(block: _QueryBlocks) -> RunningSoftmax:
        def add(kv_block: jax.Array, old: RunningSoftmax) -> RunningSoftmax:
            def computed() -> RunningSoftmax:
                return add_block(old, _compute_pair(plan, block, keys, kv_block))

            new: RunningSoftmax = lax.cond(has_pair(plan, block.low, block.high, kv_block), computed, lambda: old)
            return new

        found: RunningSoftmax = lax.fori_loop(block.first, block.end, add, nothing)
        return found

    return finish_softmax(plan, lax.map(attend, queries), operands.sinks, operands.q.dtype)


def backward(
    plan: PackedPlan,
    operands: PackedOperands,
    tables: SequenceTables,
    out: Float[Array, "1 total_q N V"],
    logsumexp: Float32[Array, "1 N total_q"],
    d_out: Float[Array, "1 total_q N V"],
    d_logsumexp: Float32[Array, "1 N total_q"],
) -> PackedOperands:
    """Compute the gradient of every operand, in the operand's shape and dtype; 0 for tokens past the last sequence."""
    queries, keys = _cut_operands(plan, operands, tables)
    shift = replace_neg_inf(logsumexp)
    # The row sums D - dlse, where D is equation (11) of `impls.block_flash.backward`.
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
        block, do, shift, rows = given

        def add(kv_block: jax.Array, found: tuple[_KeyBlocks, jax.Array]) -> tuple[_KeyBlocks, jax.Array]:
            sums, dq = found

            def computed() -> PairGradients:
                return compute_pair_gradients(_compute_pair(plan, block, keys, kv_block), do, shift, rows)._replace(
                    dx=None
                )

            parts: PairGradients = lax.cond(has_pair(plan, block.low, block.high, kv_block), computed, lambda: nothing)
            dk, dv = take_block(sums.k, kv_block) + parts.dk, take_block(sums.v, kv_block) + parts.dv
            return _KeyBlocks(put_block(sums.k, dk, kv_block), put_block(sums.v, dv, kv_block)), dq + parts.dq

        total: tuple[_KeyBlocks, jax.Array] = lax.fori_loop(block.first, block.end, add, (sums, nothing.dq))
        return total

    given = queries, cut_queries(plan, d_out), cut_rows(plan, shift), cut_rows(plan, row_sums)
    sums, dq = lax.scan(with_queries, zeros, given)
    return PackedOperands(
        q=join_queries(plan, (dq * plan.scale).astype(operands.q.dtype))[0],  # dq, equation (14)
        k=join_keys(plan, (sums.k * plan.scale).astype(operands.k.dtype))[0],  # dk, equation (15)
        v=join_keys(plan, sums.v.astype(operands.v.dtype))[0],
        sinks=compute_dsinks(operands.sinks, shift, row_sums),
    )


def _cut_operands(
    plan: PackedPlan, operands: PackedOperands, tables: SequenceTables
) -> tuple[_QueryBlocks, _KeyBlocks]:
    ranges = compute_ranges(plan, tables)
    q = cut_queries(plan, operands.q[None])
    # A query outside all sequences may be NaN, and in the backward pass 0 * NaN is not 0.
    q = jnp.where((ranges.low < ranges.high)[:, None, None, None, :, None], q, jnp.zeros((), q.dtype))
    return _QueryBlocks(q, *ranges), _KeyBlocks(cut_keys(plan, operands.k[None]), cut_keys(plan, operands.v[None]))


def _compute_pair(plan: PackedPlan, block: _QueryBlocks, keys: _KeyBlocks, kv_block: jax.Array) -> Pair:
    seen = compute_allowed(plan, block.low, block.high, kv_block)
    return compute_pair_logits(plan, block.q, take_block(keys.k, kv_block), take_block(keys.v, kv_block), seen)
