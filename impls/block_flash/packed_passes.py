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

from impls.block_flash.backward import Parts, parts_of, sink_gradient
from impls.block_flash.blocks import (
    Pair,
    cut_keys,
    cut_queries,
    cut_rows,
    join_keys,
    join_queries,
    pair_of,
    put,
    take,
)
from impls.block_flash.forward import Outputs, Running, finish, finite_or_zero, nothing_yet, with_block
from impls.block_flash.ranges import PackedPlan, allowed, holds_a_pair, ranges_of
from impls.packs import Tables
from impls.varying import varying_axes, varying_over


class PackedOperands(NamedTuple):
    """What is differentiated."""

    q: jax.Array  # [total_q, N, H]
    k: jax.Array  # [total_kv, K, H]
    v: jax.Array  # [total_kv, K, V]
    sinks: jax.Array | None  # [N]


class _Queries(NamedTuple):
    """One block of queries, or all of them with the number of the block first."""

    q: jax.Array  # [1, K, G, block_q, H]
    low: jax.Array  # [block_q]
    high: jax.Array  # [block_q]
    first: jax.Array
    end: jax.Array


class _Keys(NamedTuple):
    """All keys and values in blocks, or what is like them."""

    k: jax.Array  # [kv blocks, 1, K, block_kv, H]
    v: jax.Array  # [kv blocks, 1, K, block_kv, V]


def forward(plan: PackedPlan, operands: PackedOperands, tables: Tables) -> Outputs:
    """Attention of the pack, with a batch axis of 1. Memory beyond operands and outputs is linear in the lengths."""
    queries, keys = _cut(plan, operands, tables)
    nothing = nothing_yet(queries.q.shape[1:-1], operands.v.shape[-1])
    nothing = varying_over(nothing, varying_axes((operands, tables)))

    def attend(mine: _Queries) -> Running:
        def add(kv_block: jax.Array, old: Running) -> Running:
            def computed() -> Running:
                return with_block(old, _pair(plan, mine, keys, kv_block))

            new: Running = lax.cond(holds_a_pair(plan, mine.low, mine.high, kv_block), computed, lambda: old)
            return new

        found: Running = lax.fori_loop(mine.first, mine.end, add, nothing)
        return found

    return finish(plan, lax.map(attend, queries), operands.sinks, operands.q.dtype)


def backward(
    plan: PackedPlan,
    operands: PackedOperands,
    tables: Tables,
    out: jax.Array,
    logsumexp: jax.Array,
    d_out: jax.Array,
    d_logsumexp: jax.Array,
) -> PackedOperands:
    """Gradients of the operands, each in its shape and dtype; zero for tokens past the last sequence.

    `out` and `d_out` are `[1, total_q, N, V]`, `logsumexp` and `d_logsumexp` f32 `[1, N, total_q]`.
    """
    queries, keys = _cut(plan, operands, tables)
    shift = finite_or_zero(logsumexp)
    # (11)
    row_sums = jnp.einsum("btnv,btnv->bnt", out, d_out, precision="highest", preferred_element_type=jnp.float32)
    row_sums = row_sums - d_logsumexp
    nothing = Parts(
        dq=jnp.zeros(queries.q.shape[1:], jnp.float32),
        dk=jnp.zeros(keys.k.shape[1:], jnp.float32),
        dv=jnp.zeros(keys.v.shape[1:], jnp.float32),
        dx=None,
    )
    zeros = _Keys(*(jnp.zeros(x.shape, jnp.float32) for x in keys))
    nothing, zeros = varying_over((nothing, zeros), varying_axes((operands, tables, d_out)))

    def with_queries(sums: _Keys, given: tuple[_Queries, jax.Array, jax.Array, jax.Array]) -> tuple[_Keys, jax.Array]:
        mine, do, shift, rows = given

        def add(kv_block: jax.Array, found: tuple[_Keys, jax.Array]) -> tuple[_Keys, jax.Array]:
            sums, dq = found

            def computed() -> Parts:
                return parts_of(_pair(plan, mine, keys, kv_block), do, shift, rows)._replace(dx=None)

            parts: Parts = lax.cond(holds_a_pair(plan, mine.low, mine.high, kv_block), computed, lambda: nothing)
            dk, dv = take(sums.k, kv_block) + parts.dk, take(sums.v, kv_block) + parts.dv
            return _Keys(put(sums.k, dk, kv_block), put(sums.v, dv, kv_block)), dq + parts.dq

        total: tuple[_Keys, jax.Array] = lax.fori_loop(mine.first, mine.end, add, (sums, nothing.dq))
        return total

    given = queries, cut_queries(plan, d_out), cut_rows(plan, shift), cut_rows(plan, row_sums)
    sums, dq = lax.scan(with_queries, zeros, given)
    return PackedOperands(
        q=join_queries(plan, (dq * plan.scale).astype(operands.q.dtype))[0],  # (14)
        k=join_keys(plan, (sums.k * plan.scale).astype(operands.k.dtype))[0],  # (15)
        v=join_keys(plan, sums.v.astype(operands.v.dtype))[0],
        sinks=sink_gradient(operands.sinks, shift, row_sums),
    )


def _cut(plan: PackedPlan, operands: PackedOperands, tables: Tables) -> tuple[_Queries, _Keys]:
    ranges = ranges_of(plan, tables)
    q = cut_queries(plan, operands.q[None])
    # A query of nobody may be NaN, and on the way back 0 * NaN is not 0.
    q = jnp.where((ranges.low < ranges.high)[:, None, None, None, :, None], q, jnp.zeros((), q.dtype))
    return _Queries(q, *ranges), _Keys(cut_keys(plan, operands.k[None]), cut_keys(plan, operands.v[None]))


def _pair(plan: PackedPlan, mine: _Queries, keys: _Keys, kv_block: jax.Array) -> Pair:
    seen = allowed(plan, mine.low, mine.high, kv_block)
    return pair_of(plan, mine.q, take(keys.k, kv_block), take(keys.v, kv_block), seen)
