"""Zero the keys and values that no query attends to, before the forward kernel and that of dq read them.

Such keys and values may be NaN, and 0 * NaN is not 0. Up to depth 128, these kernels zero them in a buffer of their own
(`impls.flash_gpu.mosaic.mosaic_tiles.zero_unseen_rows`). Deeper heads leave no room for it in shared memory. The kernel
of dk and dv needs no zeros, since k and v are no factors of its sums.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from impls.flash_gpu.flash_gpu_arrays import Operands
from impls.flash_gpu.tile_schedule import FlashGpuPlan

_MAX_BUFFERED_DEPTH = 128  # beyond it, tiles of all kernels leave no room for the buffer
_STRIP_LENGTH = 128  # queries at a time, so that memory is not T * S


def zeroes_dead_keys(head_dim: int, v_head_dim: int) -> bool:
    """Return whether keys that no query attends to are zeroed before a kernel, and not in it."""
    return max(head_dim, v_head_dim) > _MAX_BUFFERED_DEPTH


def zero_dead_keys(plan: FlashGpuPlan, operands: Operands) -> tuple[FlashGpuPlan, Operands]:
    """Zero keys and values that no query attends to, at depths where a kernel has no room for it.

    Returns:
      a plan that knows of it, and operands with these keys and values; or both as they are.
    """
    if not (plan.has_dead_keys and zeroes_dead_keys(plan.head_dim, plan.v_head_dim)):
        return plan, operands
    seen = _find_seen_keys(plan, operands)[:, :, None, None]
    k, v = (jnp.where(seen, x, jnp.zeros_like(x)) for x in (operands.k, operands.v))
    return dataclasses.replace(plan, dead_keys_are_zero=True), operands._replace(k=k, v=v)


def _find_seen_keys(plan: FlashGpuPlan, operands: Operands) -> Bool[Array, "B S"]:
    """Find the keys that some query of their batch row attends to."""
    batch, (q_length, kv_length) = operands.q.shape[0], (plan.q_length, plan.kv_length)
    j = jnp.arange(kv_length, dtype=jnp.int32)[None, :]

    def visit(strip: jax.Array, seen: jax.Array) -> jax.Array:
        i = (strip * _STRIP_LENGTH + jnp.arange(_STRIP_LENGTH, dtype=jnp.int32))[:, None]
        allowed = jnp.asarray(plan.mask.allowed(i, j)) & (i < q_length)
        allowed = jnp.broadcast_to(allowed, (batch, 1, _STRIP_LENGTH, kv_length))[:, 0]
        if operands.segment_ids is not None:
            q_ids, kv_ids = operands.segment_ids
            ids = jnp.take(q_ids, i[:, 0], axis=1, mode="clip")
            allowed = allowed & (ids[:, :, None] == kv_ids[:, None, :])
        return seen | allowed.any(axis=1)

    strips = -(-q_length // _STRIP_LENGTH)
    found: jax.Array = lax.fori_loop(0, strips, visit, jnp.zeros((batch, kv_length), bool))
    return found
