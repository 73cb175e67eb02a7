"""Tile operations of the Mosaic GPU kernels: tensor core products, masks, and the online softmax.

    (1)  x_ij = scale <q_i, k_j>
    (2)  z_ij = soft_cap tanh(x_ij / soft_cap)
    (4)  m_i = max_j z_ij, over the keys so far
    (5)  l_i = sum_j exp(z_ij - m_i), over the keys so far

Tiles hold logits divided by their unit, z = unit y, and exponentials are powers of two
(`impls.flash_gpu.exponentials`).

TMA copies whole tiles of arrays that are padded to whole tiles. So the mask hides padding. The Triton kernels guard
their loads instead.

JAX's CPU interpreter of these kernels has no `wgmma` on values, on transposed references or into an accumulator that
already has a value. There the same tiles are multiplied as ordinary arrays. So only compilation and a GPU show that the
instruction is right and that its operands are swizzled correctly.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32, Shaped

from cases.masks import And, Lengths, Mask, Or
from impls.flash_gpu.exponentials import LOG2_E, replace_neg_inf
from impls.flash_gpu.tile_schedule import FlashGpuPlan, name_leaf
from impls.jax_compat import Interpret, Scalar

SUM_COLUMNS = 8
"""Number of partial sums per row. Partial sum `c` adds the columns `c`, `c + 8`, `c + 16` and so on.

Of every 8 columns that `wgmma` computes, a thread has the same two. So threads sum a tile without communication, and
combine their sums once, after the last tile.
"""


@runtime_checkable
class TileArithmetic(Protocol):
    """Static part of a call, as far as operations on one tile use it. Every plan has it."""

    @property
    def interpret(self) -> Interpret:
        """Return the `interpret` of the call: False, True, or the parameters of an interpreter."""
        ...

    @property
    def scale(self) -> float:
        """Factor of `<q, k>`."""
        ...

    @property
    def soft_cap(self) -> float | None:
        """Bound of the logits; None without a soft cap."""
        ...

    def unit(self, *, biased: bool) -> float:
        """Return the unit of the logits."""
        ...


class RunningSoftmax(NamedTuple):
    """The online softmax of one warpgroup's rows over the keys so far: m, l and the undivided output, f32."""

    maximum: Float32[Array, " rows"]  # m times log2(e)
    total: Float32[Array, "rows ..."]  # [rows, SUM_COLUMNS] until all keys are seen, then [rows]
    out: Float32[Array, "rows V"]


class PairSpan(NamedTuple):
    """Start and sizes of a tile of query/key pairs of one batch row."""

    batch: Scalar
    q_start: Scalar
    kv_start: Scalar
    queries: int
    keys: int


def multiply(
    plan: TileArithmetic, a: Any, b: Scalar, *, transposed: bool = False, issued: Callable[[], None] = lambda: None
) -> jax.Array:
    """Compute `a @ b`, or `a @ b.T`, in f32; `a` in shared memory or in registers, `b` in shared memory.

    `issued` is called after the product is issued and before it is waited for.
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


def accumulate(plan: TileArithmetic, total: jax.Array, a: Any, b: Scalar) -> jax.Array:
    """Compute `total + a @ b` in f32."""
    if plan.interpret:
        return total + _multiply_values(a, b, transposed=False)

    def multiply(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, a, b)

    start = plgpu.WGMMAAccumulatorRef.init(total)
    return pl.run_state(multiply)(start)


def _multiply_values(a: Any, b: Scalar, transposed: bool) -> jax.Array:
    left = a if isinstance(a, jax.Array) else a[...]
    dimensions = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(left, b[...], dimensions, preferred_element_type=jnp.float32)


def broadcast_over_keys(x: Shaped[Array, " rows"], keys: int) -> Shaped[Array, "rows {keys}"]:
    """Broadcast a value per row over `keys` columns."""
    return lax.broadcast_in_dim(x, (x.shape[0], keys), (0,))


def broadcast_over_queries(x: Shaped[Array, " columns"], keys: int) -> Shaped[Array, "{keys} columns"]:
    """Broadcast a value per column over `keys` rows."""
    return lax.broadcast_in_dim(x, (keys, x.shape[0]), (1,))


def compute_allowed(
    plan: FlashGpuPlan, inputs: dict[str, Any], span: PairSpan, ids: tuple[Any, Any] | None, *, keys_first: bool
) -> Any:
    """Compute which positions of a tile may attend, `[queries, keys]` or `[keys, queries]`.

    Args:
      plan: static part of the call.
      inputs: references by name, among them the lengths of masks.
      span: the tile.
      ids: segment ids of the tile's queries and of its keys.
      keys_first: whether keys are the first axis.
    """
    shape = (span.keys, span.queries) if keys_first else (span.queries, span.keys)
    q_axis, kv_axis = (1, 0) if keys_first else (0, 1)
    i = lax.broadcasted_iota(jnp.int32, shape, q_axis) + span.q_start
    j = lax.broadcasted_iota(jnp.int32, shape, kv_axis) + span.kv_start
    found = _evaluate_mask(plan.mask, inputs, span, i, j, itertools.count())
    if plan.q_length % span.queries:
        found = found & (i < plan.q_length)  # else keys that only padding queries see would count as seen
    if plan.kv_length % span.keys:
        found = found & (j < plan.kv_length)
    if ids is not None:
        q_ids, kv_ids = ids
        found = found & (
            lax.broadcast_in_dim(q_ids, shape, (q_axis,)) == lax.broadcast_in_dim(kv_ids, shape, (kv_axis,))
        )
    return found


def _evaluate_mask(
    mask: Mask, inputs: dict[str, Any], span: PairSpan, i: Scalar, j: Scalar, places: Iterator[int]
) -> Any:
    """Evaluate `mask` on a tile; `places` counts the leaves in the order of `cases.masks.iter_leaves`."""
    if isinstance(mask, And | Or):
        left = _evaluate_mask(mask.left, inputs, span, i, j, places)
        right = _evaluate_mask(mask.right, inputs, span, i, j, places)
        return left & right if isinstance(mask, And) else left | right
    name = name_leaf(next(places))
    if isinstance(mask, Lengths):
        return (i >= 0) & (j < inputs[name][span.batch])
    return mask.allowed(i, j)


def zero_unseen_rows(tile: jax.Array, keys_seen: jax.Array) -> jax.Array:
    """Zero the rows of `tile [keys, .]` that no query of `keys_seen [keys, queries]` may attend to."""
    seen = jnp.max(jnp.where(keys_seen, 1.0, 0.0), axis=1)
    return jnp.where(broadcast_over_keys(seen, tile.shape[1]) > 0, tile, jnp.zeros_like(tile))


def compute_logits(plan: TileArithmetic, products: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Compute logits in their unit from products `<q, k>`, and the soft cap's derivative, None without a soft cap."""
    z = products if plan.unit(biased=False) != 1 else products * jnp.float32(plan.scale)  # scaled logits, equation (1)
    if plan.soft_cap is None:
        return z, None
    tanh = jnp.tanh(z / jnp.float32(plan.soft_cap))
    return jnp.float32(plan.soft_cap) * tanh, 1 - tanh * tanh  # soft cap, equation (2)


def get_exponent_factor(plan: TileArithmetic) -> jax.Array:
    """Return `unit log2(e)`: the exponential of a stored logit is 2 to the power of logit times this factor."""
    return jnp.float32(plan.unit(biased=False) * LOG2_E)


def update_softmax(
    plan: TileArithmetic, old: RunningSoftmax, y: jax.Array, *, masked: bool
) -> tuple[RunningSoftmax, jax.Array]:
    """Update the softmax with a tile of logits. Return it and the tile's weights, which are not yet added to `out`.

    `masked` says that the mask may hide whole rows of the tile.
    """
    maximum = jnp.maximum(old.maximum, jnp.max(y, axis=1) * get_exponent_factor(plan))  # maximum, equation (4)
    shift = replace_neg_inf(maximum) if masked else maximum
    weights = jnp.exp2(y * get_exponent_factor(plan) - broadcast_over_keys(shift, y.shape[1]))
    decay = jnp.exp2(old.maximum - shift)
    out = old.out * broadcast_over_keys(decay, old.out.shape[1])
    return RunningSoftmax(
        maximum, old.total * broadcast_over_keys(decay, SUM_COLUMNS) + _sum_columns(weights), out
    ), weights  # sum of weights, equation (5)


def _sum_columns(weights: jax.Array) -> jax.Array:
    """Sum `weights [ROWS, keys]` over keys that are equal modulo `SUM_COLUMNS`, `[ROWS, SUM_COLUMNS]`."""
    return functools.reduce(
        jnp.add, (weights[:, at : at + SUM_COLUMNS] for at in range(0, weights.shape[1], SUM_COLUMNS))
    )
