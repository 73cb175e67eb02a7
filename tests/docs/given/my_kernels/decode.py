"""Kernels over padded caches and ring buffers, as the how-to pages import them."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def decode_attention(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
    """Compute `out [B, N, V]` for one query `q [B, N, H]` of each sequence, and zeros for an empty sequence.

    `k` is `[B, S, K, H]` and `v` is `[B, S, K, V]`; `lengths` is `[B]`.
    """
    allowed = jnp.arange(k.shape[1]) < lengths[:, None]  # [B, S]
    return grouped_attention(q[:, None], k.swapaxes(1, 2), v.swapaxes(1, 2), allowed[:, None])[:, 0]


def grouped_attention(q: jax.Array, k: jax.Array, v: jax.Array, allowed: jax.Array) -> jax.Array:
    """Compute `out [B, T, N, V]` from `q [B, T, N, H]`, heads-first `k [B, K, S, H]`, `v` and `allowed [B, T, S]`."""
    high = jax.lax.Precision.HIGHEST
    group = q.shape[2] // k.shape[1]
    seen = allowed.any(axis=1)[:, None, :, None]
    k, v = (jnp.repeat(jnp.where(seen, x.astype(jnp.float32), 0), group, axis=1) for x in (k, v))
    x = jnp.einsum("btnh,bnsh->bnts", q.astype(jnp.float32), k, precision=high) * q.shape[-1] ** -0.5
    x = jnp.where(allowed[:, None], x, -jnp.inf)
    top = x.max(axis=-1, keepdims=True)
    weights = jnp.exp(x - jnp.where(jnp.isfinite(top), top, 0))
    total = weights.sum(axis=-1, keepdims=True)
    out = jnp.einsum("bnts,bnsh->btnh", weights / jnp.where(total == 0, 1, total), v, precision=high)
    return out.astype(q.dtype)
