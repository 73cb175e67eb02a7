"""Tile operations of the Triton kernels: guarded loads and stores, masks, products and logits.

    (1)  x_ij = scale <q_i, k_j> + bias_ij
    (2)  z_ij = soft_cap tanh(x_ij / soft_cap)
    (3)  z_ij = -inf, where i may not attend to j

Without bias and soft cap, tiles hold `y = <q_i, k_j>` instead of z. The scale is then the unit of the logits:
`z = scale y` (`impls.flash_gpu.exponentials`).

The sides of a tile are powers of two; those of the operands need not be. The part of a tile beyond its array, in the
length or in the depth, is never read. It is zero.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from cases.masks import And, Dense, Lengths, Mask, Or
from impls.block_arithmetic import multiply_tiles
from impls.flash_gpu.tile_schedule import BLOCK_KINDS, FlashGpuPlan, name_leaf
from impls.flash_gpu.triton.triton_launch import Arrays, Launch
from impls.jax_compat import Ref, Scalar
from impls.pallas_gpu.triton_tiles import (
    compute_positions,
    load_values,
)

Carry = TypeVar("Carry")


class TilePair(NamedTuple):
    """Start and sizes of a tile of query/key pairs.

    A program that owns queries has tiles `[queries, keys]`. One that owns keys sums over queries, so its tiles are
    `[keys, queries]` (`keys_first`): the product of this sum then needs no transpose.
    """

    batch: Scalar
    head: Scalar  # index among the heads that the program sees
    q_start: Scalar
    kv_start: Scalar
    block_q: int
    block_kv: int
    keys_first: bool

    @property
    def q_at(self) -> Any:
        """Start of the tile's queries within the part of an array that the program sees."""
        return self.q_start if self.keys_first else 0

    @property
    def kv_at(self) -> Any:
        """Start of the tile's keys within the part of an array that the program sees."""
        return 0 if self.keys_first else self.kv_start

    def queries(self, x: jax.Array) -> jax.Array:
        """Reshape a value per query so that it broadcasts over the keys."""
        return x[None, :] if self.keys_first else x[:, None]

    def keys(self, x: jax.Array) -> jax.Array:
        """Reshape a value per key so that it broadcasts over the queries."""
        return x[:, None] if self.keys_first else x[None, :]


def get_program_ids() -> tuple[Any, Any, Any]:
    """Return this program's block along the axis that it owns, its head and its batch row."""
    return pl.program_id(0), pl.program_id(1), pl.program_id(2)


def load_pairs(ref: Ref, plan: FlashGpuPlan, pair: TilePair) -> jax.Array:
    """Load a tile of an array over pairs `[heads or 1, T or 1, S or 1]`, which broadcasts to the tile of `pair`."""
    heads, q_length, kv_length = ref.shape
    rows, row = (pair.block_q, pair.q_at) if q_length > 1 else (1, 0)
    columns, column = (pair.block_kv, pair.kv_at) if kv_length > 1 else (1, 0)
    at = ref.at[jnp.int32(pair.head if heads > 1 else 0), pl.ds(row, rows), pl.ds(column, columns)]
    inside_q = compute_positions(pair.q_start if q_length > 1 else 0, rows)[:, None] < plan.q_length
    inside_kv = compute_positions(pair.kv_start if kv_length > 1 else 0, columns)[None, :] < plan.kv_length
    tile = plt.load(at, mask=inside_q & inside_kv, other=0)
    return tile.T if pair.keys_first else tile


def visit_blocks(
    launch: Launch, inputs: Arrays, head: Scalar, step: Callable[[bool, Any, Carry], Carry], carry: Carry
) -> Carry:
    """Fold `step(masked, block, carry)` over the blocks that this program visits.

    The kernel has no code for kinds of blocks that no program visits.
    """
    table = inputs["visits"]
    place = head if table.shape[0] > 1 else jnp.int32(0)
    for kind in launch.kinds:
        column = 2 * BLOCK_KINDS.index(kind)
        first, count = table[place, column], table[place, column + 1]
        listed = inputs.get(f"{kind}_blocks")
        visit = functools.partial(_visit, functools.partial(step, kind == "partial"), first, listed)
        carry = lax.fori_loop(jnp.int32(0), count, visit, carry)
    return carry


def _visit(step: Callable[[Any, Carry], Carry], first: Scalar, listed: Any, t: Any, carry: Carry) -> Carry:
    return step(first + t if listed is None else listed[first + t], carry)


def compute_allowed(plan: FlashGpuPlan, inputs: Arrays, pair: TilePair) -> jax.Array:
    """Compute which positions of the tile of `pair` may attend: by mask and segments, or by key ranges."""
    j = pair.keys(compute_positions(pair.kv_start, pair.block_kv))
    if plan.packed:
        low, high = load_key_ranges(plan, inputs, pair)
        return (j >= pair.queries(low)) & (j < pair.queries(high))
    i = pair.queries(compute_positions(pair.q_start, pair.block_q))
    found = _evaluate_mask(plan.mask, plan, inputs, pair, i, j, itertools.count())
    if plan.q_length % pair.block_q:
        found = found & (i < plan.q_length)  # else keys that only padding queries see would count as seen
    if plan.kv_length % pair.block_kv:
        found = found & (j < plan.kv_length)
    if plan.segmented:
        q_ids = load_values(inputs["q_ids"], pair.q_start, pair.block_q, plan.q_length, at=pair.q_at)
        kv_ids = load_values(inputs["kv_ids"], pair.kv_start, pair.block_kv, plan.kv_length, at=pair.kv_at)
        found = found & (pair.queries(q_ids) == pair.keys(kv_ids))
    return found


def load_key_ranges(plan: FlashGpuPlan, inputs: Arrays, pair: TilePair) -> tuple[jax.Array, jax.Array]:
    """Load the first key that each query of a tile sees, and one past the last; both are 0 if it sees no key."""
    low, high = (
        load_values(inputs[name], pair.q_start, pair.block_q, plan.q_length, at=pair.q_at) for name in ("low", "high")
    )
    return low, high


def _evaluate_mask(
    mask: Mask, plan: FlashGpuPlan, inputs: Arrays, pair: TilePair, i: Scalar, j: Scalar, places: Iterator[int]
) -> Any:
    """Evaluate `mask` on a tile; `places` counts the leaves in the order of `cases.masks.iter_leaves`."""
    if isinstance(mask, And | Or):
        left = _evaluate_mask(mask.left, plan, inputs, pair, i, j, places)
        right = _evaluate_mask(mask.right, plan, inputs, pair, i, j, places)
        return left & right if isinstance(mask, And) else left | right
    name = name_leaf(next(places))
    if isinstance(mask, Lengths):
        return (i >= 0) & (j < inputs[name][pair.batch])
    if isinstance(mask, Dense):
        return load_pairs(inputs[name], plan, pair) != 0
    return mask.allowed(i, j)


def multiply(plan: FlashGpuPlan, a: jax.Array, b: jax.Array, *, over: tuple[int, int]) -> jax.Array:
    """Multiply two tiles of one dtype in f32, contracting axis `over[0]` of `a` with `over[1]` of `b`."""
    return multiply_tiles(a, b, over, exact=plan.exact)


def get_logit_unit(plan: FlashGpuPlan, inputs: Arrays) -> float:
    """Return the unit of the logits in tiles: a logit is this factor times the stored value."""
    return plan.unit(biased="bias" in inputs)


def compute_logits(
    plan: FlashGpuPlan, inputs: Arrays, pair: TilePair, q: jax.Array, k: jax.Array, allowed: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Compute the logits of a tile in their unit, and the soft cap's derivative, None without a soft cap."""
    z = multiply(plan, k, q, over=(1, 1)) if pair.keys_first else multiply(plan, q, k, over=(1, 1))
    if get_logit_unit(plan, inputs) == 1:
        z = z * jnp.float32(plan.scale)  # scaled logits, equation (1)
    if "bias" in inputs:
        z = z + load_pairs(inputs["bias"], plan, pair).astype(jnp.float32)
    slope = None
    if plan.soft_cap is not None:
        tanh = jnp.tanh(z / jnp.float32(plan.soft_cap))
        z, slope = jnp.float32(plan.soft_cap) * tanh, 1 - tanh * tanh  # soft cap, equation (2)
    if allowed is not None:
        z = jnp.where(allowed, z, -jnp.inf)  # hidden pairs get -inf, equation (3)
    return z, slope
