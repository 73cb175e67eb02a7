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
    num_sink_tokens: int = 0,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,  # [N]
    save_residuals: bool = False,
) -> Any:
    """Attend to the tokens that the slots hold: `out [rows, T, N, V]`, residuals `[rows, N, T]`.

    The first `num_sink_tokens` tokens stay in the first slots, and all queries see them.
    """
    rows, count, heads, depth = q.shape
    kv_heads, slots = k_cache.shape[1:3]
    first = num_sink_tokens
    slot, last = jnp.arange(slots), cache_seqlens[:, None] - 1 - first
    # In each slot of the ring behind the first slots, the last token that was put there; negative where none was.
    token = last - (last - slot + first) % (slots - first)
    token = jnp.where(token >= 0, token + first, -1)
    token = jnp.where(slot < first, jnp.where(slot < cache_seqlens[:, None], slot, -1), token)
    position = cache_seqlens[:, None] - count + jnp.arange(count)
    allowed = (token[:, None] >= 0) & (token[:, None] <= position[..., None])
    if window is not None:
        allowed &= (token[:, None] >= position[..., None] - window[0]) | (token[:, None] < first)
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


def attend_by_token(
    q: jax.Array,  # [rows, T, N, H]
    k_cache: jax.Array,  # [rows, K, slots, H]
    v_cache: jax.Array,  # [rows, K, slots, V]
    *,
    cache_seqlens: jax.Array,  # [rows]
    window: tuple[int, int] | None = None,
    num_sink_tokens: int = 0,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,  # [N]
    save_residuals: bool = False,
) -> Any:
    """Look up the slot of each token that a query sees: the first ones, then those of its window."""
    rows, count, heads, depth = q.shape
    kv_heads, slots = k_cache.shape[1:3]
    first = num_sink_tokens
    left = slots - 1 if window is None else min(window[0], slots - 1)
    position = cache_seqlens[:, None] - count + jnp.arange(count)
    kept = jnp.broadcast_to(jnp.arange(first), (rows, count, first))
    seen = position[..., None] - jnp.arange(left + 1)
    slot = jnp.where(seen < first, 0, first + (seen - first) % (slots - first))
    allowed = jnp.concatenate([kept <= position[..., None], (seen >= first)], axis=-1)  # [rows, T, L]
    place = jnp.concatenate([kept, slot], axis=-1)
    row = jnp.arange(rows)[:, None, None]
    k, v = (jnp.where(allowed[..., None, None], x[row, :, place], 0) for x in (k_cache, v_cache))  # [rows, T, L, K, .]
    k, v = (jnp.repeat(x.astype(jnp.float32), heads // kv_heads, axis=3) for x in (k, v))
    x = jnp.einsum("btnh,btlnh->btnl", q.astype(jnp.float32), k, precision="highest")
    x *= depth**-0.5 if scale is None else scale
    if soft_cap is not None:
        x = soft_cap * jnp.tanh(x / soft_cap)
    x = jnp.where(allowed[:, :, None], x, -jnp.inf)
    top = x.max(axis=-1)
    sink = jnp.full(heads, -jnp.inf) if sinks is None else sinks.astype(jnp.float32)
    shift = jnp.maximum(top, sink)
    shift = jnp.where(jnp.isfinite(shift), shift, 0)
    weights = jnp.exp(x - shift[..., None])
    total = weights.sum(axis=-1) + jnp.exp(sink - shift)
    some = jnp.where(total > 0, total, 1)
    out = jnp.einsum("btnl,btlnv->btnv", weights / some[..., None], v, precision="highest").astype(q.dtype)
    if not save_residuals:
        return out
    lse = jnp.where(total > 0, shift + jnp.log(some), -jnp.inf)
    return out, {name: x.swapaxes(1, 2) for name, x in (("logsumexp", lse), ("max_logits", top))}
