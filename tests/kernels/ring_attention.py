"""Attention over a ring buffer, written as users write it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def attend_ring(
    q: jax.Array,  # [rows, T, N, H]
    k_cache: jax.Array,  # [rows, K, slots, H]
    v_cache: jax.Array,  # [rows, K, slots, V]
    *,
    cache_seqlens: jax.Array,  # [rows]
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,  # [N]
    save_residuals: bool = False,
) -> Any:
    """Attend to the tokens that the slots hold: `out [rows, T, N, V]`, residuals `[rows, N, T]`."""
    rows, count, heads, depth = q.shape
    kv_heads, slots = k_cache.shape[1:3]
    last = cache_seqlens[:, None] - 1
    token = last - (last - jnp.arange(slots)) % slots  # in each slot, negative where nothing was written
    position = cache_seqlens[:, None] - count + jnp.arange(count)
    allowed = (token[:, None] >= 0) & (token[:, None] <= position[..., None])
    if window is not None:
        allowed &= token[:, None] >= position[..., None] - window[0]
    seen = allowed.any(axis=1)[:, None, :, None]
    k, v = (jnp.where(seen, x, 0) for x in (k_cache, v_cache))
    grouped = q.reshape(rows, count, kv_heads, heads // kv_heads, depth)
    x = jnp.einsum("btkgh,bksh->bkgts", grouped, k, preferred_element_type=jnp.float32)
    x *= depth**-0.5 if scale is None else scale
    if soft_cap is not None:
        x = soft_cap * jnp.tanh(x / soft_cap)
    allowed = allowed[:, None, None]
    top = jnp.where(allowed, x, -jnp.inf).max(axis=-1)  # [rows, K, G, T]
    sink = -jnp.inf if sinks is None else sinks.reshape(kv_heads, -1, 1)
    shift = jnp.maximum(top, sink)
    shift = jnp.where(jnp.isfinite(shift), shift, 0)
    weights = jnp.where(allowed, jnp.exp(x - shift[..., None]), 0)
    total = weights.sum(axis=-1) + jnp.exp(sink - shift)
    some = jnp.where(total > 0, total, 1)
    p = (weights / some[..., None]).astype(v.dtype)
    out = jnp.einsum("bkgts,bksv->btkgv", p, v, preferred_element_type=jnp.float32)
    out = out.reshape(rows, count, heads, -1).astype(q.dtype)
    if not save_residuals:
        return out
    lse = jnp.where(total > 0, shift + jnp.log(some), -jnp.inf)
    return out, {name: x.reshape(rows, heads, count) for name, x in (("logsumexp", lse), ("max_logits", top))}
