"""Compute attention with all features in plain JAX: a base for planted faults."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from conformance import declare

F32 = jnp.float32


def allowed(batch: Any, heads: Any, t: Any, s: Any, causal: Any, window: Any, mask: Any, segment_ids: Any) -> Any:
    i, j = jnp.arange(t)[:, None], jnp.arange(s)[None, :]
    ok = jnp.ones((1, 1, t, s), bool)
    if causal:
        ok &= j <= i
    if window is not None:
        left, right = window
        if left is not None:
            ok &= j >= i - left
        if right is not None:
            ok &= j <= i + right
    if mask is not None:
        ok = ok & mask
    if segment_ids is not None:
        q_ids, kv_ids = segment_ids
        ok = ok & (q_ids[:, None, :, None] == kv_ids[:, None, None, :])
    return jnp.broadcast_to(ok, (batch, heads, t, s))


def forward(q: Any, k: Any, v: Any, sinks: Any, bias: Any, ok: Any, soft_cap: Any, scale: Any) -> Any:
    b, t, n, h = q.shape
    s, kv_heads = k.shape[1:3]
    group = n // kv_heads
    x = jnp.einsum("btkgh,bskh->bkgts", q.reshape(b, t, kv_heads, group, h), k).reshape(b, n, t, s) * scale
    if bias is not None:
        x = x + bias.astype(F32)
    if soft_cap is not None:
        x = soft_cap * jnp.tanh(x / soft_cap)
    z = jnp.where(ok, x, -jnp.inf)
    top = z.max(-1, keepdims=True)
    m = top
    if sinks is not None:
        sink = sinks.astype(F32)[None, :, None, None]
        m = jnp.maximum(m, sink)
    m = jax.lax.stop_gradient(jnp.where(jnp.isfinite(m), m, 0.0))
    p = jnp.exp(z - m)
    sums = p.sum(-1, keepdims=True)
    if sinks is not None:
        sums = sums + jnp.exp(sink - m)
    full = jnp.where(sums == 0, 1.0, sums)
    w = p / full
    out = jnp.einsum("bkgts,bskv->btkgv", w.reshape(b, kv_heads, group, t, s), v).reshape(b, t, n, v.shape[-1])
    lse = jnp.where(sums == 0, -jnp.inf, m + jnp.log(full))
    return out, {"logsumexp": lse[..., 0], "max_logits": top[..., 0]}


def seen_keys(ok: Any, kv_heads: Any) -> Any:
    b, n, t, s = ok.shape
    return ok.reshape(b, kv_heads, n // kv_heads, t, s).any((2, 3)).transpose(0, 2, 1)[..., None]  # [b, s, k, 1]


@declare(empty_rows="zero")
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: Any = False,
    window: Any = None,
    mask: Any = None,
    segment_ids: Any = None,
    soft_cap: Any = None,
    sinks: Any = None,
    bias: Any = None,
    scale: Any = None,
    save_residuals: Any = False,
) -> Any:
    b, t, n, h = q.shape
    s, kv_heads = k.shape[1:3]
    scale = h**-0.5 if scale is None else scale
    ok = allowed(b, n, t, s, causal, window, mask, segment_ids)
    seen = seen_keys(ok, kv_heads)
    kf, vf = jnp.where(seen, k.astype(F32), 0.0), jnp.where(seen, v.astype(F32), 0.0)
    out, saved = forward(q.astype(F32), kf, vf, sinks, bias, ok, soft_cap, scale)
    out = out.astype(q.dtype)
    return (out, saved) if save_residuals else out
