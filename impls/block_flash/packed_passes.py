"""Forward and backward pass over packed sequences: each block of queries visits the key blocks of its sequences.

The steps and the numbers of the formulas are those of `impls.block_flash.forward` and `impls.block_flash.backward`.
Dense operands have a static schedule. For packed operands, the range of key blocks of each query block is only known at
run time. The loop runs over that range and skips blocks in which no query sees a key. Under `vmap` over tables, skipped
blocks are computed too, since a block may be empty for only some of the tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from impls.block_arithmetic import compute_dsinks, put_block, replace_neg_inf, take_block
from impls.block_flash.backward import PairGradients, compute_pair_gradients
from impls.block_flash.block_schedule import FlashSizes
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
from impls.captured_arrays import Captured
from impls.packed_sequences import QueryPlaces, SequenceTables, compute_key_ranges, find_places
from impls.varying_axes import find_varying_axes, mark_varying


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedPlan(FlashSizes):
    """Static part of a packed call; `q_length` and `kv_length` are total lengths over all sequences."""

    left: int | None
    right: int | None
    # Functions of places (docs/contract.md, section 2): whether a query sees a key, and a change of its logit.
    mask_mod: Callable[..., Any] | None = None
    score_mod: Callable[..., Any] | None = None


class PairOperands(NamedTuple):
    """Operands without gradients that say more of pairs of a query and a key; None where a call lacks them."""

    segment_ids: tuple[Int32[Array, " total_q"], Int32[Array, " total_kv"]] | None = None
    mask: Bool[Array, "total_q S"] | None = None  # whether a query sees each key of its sequence
    tree_mask: Bool[Array, "total_q W"] | None = None  # whether it sees the key of each query of its sequence
    alibi_slopes: Float32[Array, " N"] | None = None


class KeyRanges(NamedTuple):
    """Ranges of keys that each query sees, and of key blocks that each block of queries visits; int32."""

    low: Int32[Array, "q_blocks block_q"]  # first key of each query; 0 for a query that sees no key
    high: Int32[Array, "q_blocks block_q"]  # one past the last key of each query; 0 for a query that sees no key
    first: Int32[Array, " q_blocks"]  # the first block of keys to visit
    end: Int32[Array, " q_blocks"]  # one past the last block of keys to visit


def compute_ranges(plan: PackedPlan, tables: SequenceTables) -> KeyRanges:
    """Compute the key ranges of a call. Table entries past the last sequence may be any integers."""
    found = compute_key_ranges(tables, (plan.left, plan.right), plan.num_q_blocks * plan.block_q)
    low, high = (x.reshape(-1, plan.block_q) for x in found)
    # A query that sees no key must not widen the range.
    first = jnp.where(low < high, low, plan.kv_length).min(axis=1) // plan.block_kv
    return KeyRanges(low, high, first=first, end=(high.max(axis=1) + (plan.block_kv - 1)) // plan.block_kv)


def has_pair(
    plan: PackedPlan, low: Int32[Array, " block_q"], high: Int32[Array, " block_q"], kv_block: Int32[Array, ""]
) -> Bool[Array, ""]:
    """Return whether any query of a block `[block_q]` sees any key of a block of keys.

    The range of key blocks that a block of queries visits may contain unseen key blocks: keys of a sequence without
    queries, or keys before the windows of all these queries.
    """
    start = kv_block * plan.block_kv
    return ((low < start + plan.block_kv) & (high > start)).any()


def compute_allowed(
    plan: PackedPlan, low: Int32[Array, " block_q"], high: Int32[Array, " block_q"], kv_block: Int32[Array, ""]
) -> Bool[Array, "1 1 1 block_q block_kv"]:
    """Compute which positions of a pair of blocks may attend, `[1, 1, 1, block_q, block_kv]`."""
    j = kv_block * plan.block_kv + jnp.arange(plan.block_kv, dtype=jnp.int32)
    seen: Bool[Array, "block_q block_kv"] = (j >= low[:, None]) & (j < high[:, None])
    return seen[None, None, None]


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
    places: QueryPlaces | None  # `[block_q]` each; None if no function and no operand of pairs needs them
    ids: Int32[Array, " block_q"] | None
    mask: Bool[Array, "block_q S"] | None
    tree_mask: Bool[Array, "block_q W"] | None


class _KeyBlocks(NamedTuple):
    """All keys and values split into blocks, or their gradients in the same shapes."""

    k: Float[Array, "kv_blocks 1 K block_kv H"]
    v: Float[Array, "kv_blocks 1 K block_kv V"]


def forward(plan: PackedPlan, operands: PackedOperands, tables: SequenceTables, of_pairs: PairOperands) -> Outputs:
    """Compute attention over packed sequences in memory linear in the lengths. Results have a batch axis of size 1."""
    queries, keys = _cut_operands(plan, operands, tables, of_pairs)
    nothing = start_softmax(queries.q.shape[1:-1], operands.v.shape[-1])
    nothing = mark_varying(nothing, find_varying_axes((operands, tables)))

    def attend(block: _QueryBlocks) -> RunningSoftmax:
        def add(kv_block: jax.Array, old: RunningSoftmax) -> RunningSoftmax:
            def computed() -> RunningSoftmax:
                return add_block(old, _compute_pair(plan, of_pairs, block, keys, kv_block))

            new: RunningSoftmax = lax.cond(has_pair(plan, block.low, block.high, kv_block), computed, lambda: old)
            return new

        found: RunningSoftmax = lax.fori_loop(block.first, block.end, add, nothing)
        return found

    return finish_softmax(plan, lax.map(attend, queries), operands.sinks, operands.q.dtype)


def backward(
    plan: PackedPlan,
    operands: PackedOperands,
    tables: SequenceTables,
    of_pairs: PairOperands,
    out: Float[Array, "1 total_q N V"],
    logsumexp: Float32[Array, "1 N total_q"],
    d_out: Float[Array, "1 total_q N V"],
    d_logsumexp: Float32[Array, "1 N total_q"],
) -> PackedOperands:
    """Compute the gradient of every operand, in the operand's shape and dtype; 0 for tokens past the last sequence."""
    queries, keys = _cut_operands(plan, operands, tables, of_pairs)
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
                pair = _compute_pair(plan, of_pairs, block, keys, kv_block)
                return compute_pair_gradients(pair, do, shift, rows)._replace(dx=None)

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
    plan: PackedPlan, operands: PackedOperands, tables: SequenceTables, of_pairs: PairOperands
) -> tuple[_QueryBlocks, _KeyBlocks]:
    ranges = compute_ranges(plan, tables)
    q = cut_queries(plan, operands.q[None])
    # A query outside all sequences may be NaN, and in the backward pass 0 * NaN is not 0.
    q = jnp.where((ranges.low < ranges.high)[:, None, None, None, :, None], q, jnp.zeros((), q.dtype))

    def cut(x: jax.Array | None) -> jax.Array | None:
        if x is None:
            return None
        padded = jnp.pad(x, ((0, -len(x) % plan.block_q), *((0, 0),) * (x.ndim - 1)))
        return padded.reshape(-1, plan.block_q, *x.shape[1:])

    needs_places = plan.mask_mod or plan.score_mod or any(x is not None for x in of_pairs[1:])
    places = jax.tree.map(cut, find_places(tables, plan.q_length)) if needs_places else None
    ids = None if of_pairs.segment_ids is None else of_pairs.segment_ids[0]
    further = (places, cut(ids), cut(of_pairs.mask), cut(of_pairs.tree_mask))
    keys = _KeyBlocks(cut_keys(plan, operands.k[None]), cut_keys(plan, operands.v[None]))
    return _QueryBlocks(q, *ranges, *further), keys


def _compute_pair(
    plan: PackedPlan, of_pairs: PairOperands, block: _QueryBlocks, keys: _KeyBlocks, kv_block: jax.Array
) -> Pair:
    seen = compute_allowed(plan, block.low, block.high, kv_block)
    k, v = take_block(keys.k, kv_block), take_block(keys.v, kv_block)
    j = kv_block * plan.block_kv + jnp.arange(plan.block_kv, dtype=jnp.int32)
    if of_pairs.segment_ids is not None and block.ids is not None:
        seen = seen & (block.ids[:, None] == of_pairs.segment_ids[1][jnp.minimum(j, plan.kv_length - 1)])
    if block.places is None:
        return compute_pair_logits(plan, block.q, k, v, seen)
    places = jax.tree.map(lambda x: x[:, None], block.places)
    j = j - places.kv_start  # the place of each key in the sequence of each query, [block_q, block_kv]
    for mask, first in ((block.mask, 0), (block.tree_mask, places.before)):
        if mask is not None:
            column = jnp.clip(j - first, 0, mask.shape[1] - 1)
            seen = seen & ((j < first) | jnp.take_along_axis(mask, column, axis=1))
    n = jnp.arange(plan.num_q_heads, dtype=jnp.int32).reshape(plan.num_kv_heads, -1, 1, 1)
    if plan.mask_mod is not None:
        seen = seen & plan.mask_mod(places.sequence, n, places.position, j)
    penalty = None
    if of_pairs.alibi_slopes is not None:
        penalty = of_pairs.alibi_slopes[n][None] * jnp.abs(places.position - j).astype(jnp.float32)

    def score(x: jax.Array, captured: Captured) -> jax.Array:
        assert plan.score_mod is not None
        changed: jax.Array = plan.score_mod(x, places.sequence, n, places.position, j)
        return changed

    return compute_pair_logits(
        plan, block.q, k, v, seen, penalty=penalty, score=None if plan.score_mod is None else score
    )
