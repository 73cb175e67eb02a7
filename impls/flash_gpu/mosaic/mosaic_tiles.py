"""Tiles of the Mosaic GPU kernels: products on the tensor cores, which pairs may attend, the softmax so far.

    (1)  x_ij = scale <q_i, k_j>
    (2)  z_ij = soft_cap tanh(x_ij / soft_cap)
    (4)  m_i = max_j z_ij, over the keys so far
    (5)  l_i = sum_j exp(z_ij - m_i), over the keys so far

Logits are kept in a unit, z = unit y, and exponentials are powers of two (`impls.flash_gpu.exponentials`).

The Triton kernels guard their loads. Here TMA brings whole tiles, of arrays that are padded to whole tiles; so the
tails are masked.

JAX's CPU interpreter of these kernels has no `wgmma` on values, on transposed references or into an accumulator that
has a value already. There the same tiles are multiplied as ordinary arrays. That the instruction is the right one, and
its operands swizzled as it needs them, shows only in compiling and on a GPU.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cases.masks import And, Lengths, Mask, Or
from impls.flash_gpu.exponentials import LOG2_E, replace_neg_inf
from impls.flash_gpu.tile_schedule import FlashGpuPlan, name_leaf

SUM_COLUMNS = 8
"""In which the sum of a row is kept: one for each of 8 columns, since a thread holds the same two of every 8 that
`wgmma` computes. So threads add up a tile by themselves, and with each other once, after the last one."""


class RunningSoftmax(NamedTuple):
    """m, l and the sum of (6) for the keys so far, of the rows of one warpgroup, f32."""

    maximum: jax.Array  # [ROWS], in base 2
    total: jax.Array  # [ROWS, SHARES] until all keys are seen, then [ROWS]
    out: jax.Array  # [ROWS, V]


class PairSpan(NamedTuple):
    """A tile of pairs of one batch row: where it starts, and its sizes."""

    batch: Any
    q_start: Any
    kv_start: Any
    queries: int
    keys: int


def multiply(
    plan: FlashGpuPlan, a: Any, b: Any, *, transposed: bool = False, issued: Callable[[], None] = lambda: None
) -> jax.Array:
    """`a @ b`, or `a @ b.T`, in f32; `a` in shared memory or in registers, `b` in shared memory.

    `issued` is called between asking for the product and waiting for it.
    """
    shape = (a.shape[0], b.shape[0 if transposed else 1])
    if plan.interpret:
        found = _multiply_values(a, b, transposed)
        issued()
        return found

    def multiply(accumulator: Any) -> jax.Array:
        plgpu.wgmma(accumulator, a, b.T if transposed else b)
        issued()
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def accumulate(plan: FlashGpuPlan, total: jax.Array, a: Any, b: Any) -> jax.Array:
    """`total + a @ b`, in f32."""
    if plan.interpret:
        return total + _multiply_values(a, b, transposed=False)

    def multiply(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, a, b)

    start = plgpu.WGMMAAccumulatorRef.init(total)  # type: ignore[no-untyped-call] # untyped upstream
    return pl.run_state(multiply)(start)


def _multiply_values(a: Any, b: Any, transposed: bool) -> jax.Array:
    left = a if isinstance(a, jax.Array) else a[...]
    dimensions = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(left, b[...], dimensions, preferred_element_type=jnp.float32)


def broadcast_over_keys(x: jax.Array, keys: int) -> jax.Array:
    """A value for each row, repeated over `keys` columns."""
    return lax.broadcast_in_dim(x, (x.shape[0], keys), (0,))


def broadcast_over_queries(x: jax.Array, keys: int) -> jax.Array:
    """A value for each column, repeated over `keys` rows."""
    return lax.broadcast_in_dim(x, (keys, x.shape[0]), (1,))


def compute_allowed(
    plan: FlashGpuPlan, inputs: dict[str, Any], span: PairSpan, ids: tuple[Any, Any] | None, *, keys_first: bool
) -> Any:
    """Booleans `[queries, keys]`, or `[keys, queries]`: mask, segments, and that query and key exist.

    Args:
      plan: the problem.
      inputs: references by name, of lengths among them.
      span: the tile.
      ids: segments of its queries and of its keys.
      keys_first: which axis comes first.
    """
    shape = (span.keys, span.queries) if keys_first else (span.queries, span.keys)
    q_axis, kv_axis = (1, 0) if keys_first else (0, 1)
    i = lax.broadcasted_iota(jnp.int32, shape, q_axis) + span.q_start
    j = lax.broadcasted_iota(jnp.int32, shape, kv_axis) + span.kv_start
    found = _evaluate_mask(plan.mask, inputs, span, i, j, itertools.count())
    if plan.q_length % span.queries:
        found = found & (i < plan.q_length)  # or keys would count as seen that only a missing query sees
    if plan.kv_length % span.keys:
        found = found & (j < plan.kv_length)
    if ids is not None:
        q_ids, kv_ids = ids
        found = found & (
            lax.broadcast_in_dim(q_ids, shape, (q_axis,)) == lax.broadcast_in_dim(kv_ids, shape, (kv_axis,))
        )
    return found


def _evaluate_mask(mask: Mask, inputs: dict[str, Any], span: PairSpan, i: Any, j: Any, places: Iterator[int]) -> Any:
    """`mask` on a tile; `places` counts the leaves in the order of `cases.masks.leaves`."""
    if isinstance(mask, And | Or):
        left = _evaluate_mask(mask.left, inputs, span, i, j, places)
        right = _evaluate_mask(mask.right, inputs, span, i, j, places)
        return left & right if isinstance(mask, And) else left | right
    name = name_leaf(next(places))
    if isinstance(mask, Lengths):
        return (i >= 0) & (j < inputs[name][span.batch])
    return mask.allowed(i, j)


def zero_unseen_rows(tile: jax.Array, keys_seen: jax.Array) -> jax.Array:
    """`tile` `[keys, .]` with zero in the rows of keys that no query of `keys_seen` `[keys, queries]` may attend to."""
    seen = jnp.max(jnp.where(keys_seen, 1.0, 0.0), axis=1)
    return jnp.where(broadcast_over_keys(seen, tile.shape[1]) > 0, tile, jnp.zeros_like(tile))


def compute_logits(plan: FlashGpuPlan, products: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Logits of products `<q, k>` in their unit, and the derivative of (2), none without a soft cap."""
    z = products if plan.unit(biased=False) != 1 else products * jnp.float32(plan.scale)  # (1)
    if plan.soft_cap is None:
        return z, None
    tanh = jnp.tanh(z / jnp.float32(plan.soft_cap))
    return jnp.float32(plan.soft_cap) * tanh, 1 - tanh * tanh  # (2)


def get_exponent_factor(plan: FlashGpuPlan) -> jax.Array:
    """By which a logit in its unit is its natural value times log2(e)."""
    return jnp.float32(plan.unit(biased=False) * LOG2_E)


def update_softmax(
    plan: FlashGpuPlan, old: RunningSoftmax, y: jax.Array, *, masked: bool
) -> tuple[RunningSoftmax, jax.Array]:
    """The softmax with one more tile of logits, and the weights of the tile, which are not yet in its `out`.

    Only in a masked tile may a row have no logit.
    """
    maximum = jnp.maximum(old.maximum, jnp.max(y, axis=1) * get_exponent_factor(plan))  # (4)
    shift = replace_neg_inf(maximum) if masked else maximum
    weights = jnp.exp2(y * get_exponent_factor(plan) - broadcast_over_keys(shift, y.shape[1]))
    decay = jnp.exp2(old.maximum - shift)
    out = old.out * broadcast_over_keys(decay, old.out.shape[1])
    return RunningSoftmax(
        maximum, old.total * broadcast_over_keys(decay, SUM_COLUMNS) + _sum_columns(weights), out
    ), weights  # (5)


def _sum_columns(weights: jax.Array) -> jax.Array:
    """Sums of `weights` `[ROWS, keys]` over every eighth key, `[ROWS, SHARES]`."""
    return functools.reduce(
        jnp.add, (weights[:, at : at + SUM_COLUMNS] for at in range(0, weights.shape[1], SUM_COLUMNS))
    )
