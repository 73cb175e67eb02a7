"""Which positions of a tile may attend, in the Mosaic GPU kernels.

TMA copies whole tiles of arrays that are padded to whole tiles. So the mask hides padding. The Triton kernels guard
their loads instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cases.masks import And, Lengths, Mask, Or
from impls.flash_gpu.tile_schedule import FlashGpuPlan, name_leaf
from impls.jax_compat import Scalar
from impls.pallas_gpu.mosaic_tiles import (
    broadcast_over_keys,
)


class PairSpan(NamedTuple):
    """Start and sizes of a tile of query/key pairs of one batch row."""

    batch: Scalar
    q_start: Scalar
    kv_start: Scalar
    queries: int
    keys: int


def compute_allowed(
    plan: FlashGpuPlan, inputs: dict[str, Any], span: PairSpan, ids: tuple[Any, Any] | None, *, keys_first: bool
) -> Any:
    """Compute which positions of a tile may attend, `[queries, keys]` or `[keys, queries]`."""
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
