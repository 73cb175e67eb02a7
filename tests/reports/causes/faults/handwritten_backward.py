"""Compute attention with all features and a backward pass written by hand: a base for faults of gradients."""

from __future__ import annotations

import functools
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


def logits(q: Any, k: Any, bias: Any, ok: Any, soft_cap: Any, scale: Any) -> Any:
    x = jnp.einsum("btnh,bsnh->bnts", q, k) * scale
    if bias is not None:
        x = x + bias.astype(F32)
    if soft_cap is not None:
        x = soft_cap * jnp.tanh(x / soft_cap)
    return jnp.where(ok, x, -jnp.inf)


def forward(q: Any, k: Any, v: Any, sinks: Any, bias: Any, ok: Any, soft_cap: Any, scale: Any) -> Any:
    z = logits(q, k, bias, ok, soft_cap, scale)
    top = z.max(-1)
    m = top if sinks is None else jnp.maximum(top, sinks.astype(F32)[:, None])
    m = jnp.where(jnp.isfinite(m), m, 0.0)
    p = jnp.exp(z - m[..., None])
    sums = p.sum(-1)
    if sinks is not None:
        sums = sums + jnp.exp(sinks.astype(F32)[:, None] - m)
    full = jnp.where(sums == 0, 1.0, sums)
    out = jnp.einsum("bnts,bsnv->btnv", p / full[..., None], v)
    return out, jnp.where(sums == 0, -jnp.inf, m + jnp.log(full)), top


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def attend(q: Any, k: Any, v: Any, sinks: Any, bias: Any, marks: Any, form: Any, soft_cap: Any, scale: Any) -> Any:
    return kept(q, k, v, sinks, bias, marks, form, soft_cap, scale)[0]


def kept(q: Any, k: Any, v: Any, sinks: Any, bias: Any, marks: Any, form: Any, soft_cap: Any, scale: Any) -> Any:
    group = q.shape[2] // k.shape[2]
    ok = allowed(q.shape[0], q.shape[2], q.shape[1], k.shape[1], *form, *marks)
    kn, vn = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    out, lse, top = forward(q, kn, vn, sinks, bias, ok, soft_cap, scale)
    return (out, lse, top), (q, k, v, sinks, bias, marks, out, lse)


def backward(form: Any, soft_cap: Any, scale: Any, saved: Any, given: Any) -> Any:
    q, k, v, sinks, bias, marks, out, lse = saved
    g, dlse, _ = given
    b, t, n, h = q.shape
    s, kv_heads = k.shape[1:3]
    group = n // kv_heads
    causal, window = form
    mask, segment_ids = marks
    ok = allowed(b, n, t, s, causal, window, mask, segment_ids)
    kn, vn = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    z = logits(q, kn, bias, ok, soft_cap, scale)
    safe = jnp.where(jnp.isfinite(lse), lse, 0.0)[..., None]
    p = jnp.where(ok, jnp.exp(z - safe), 0.0)
    dv = jnp.einsum("bnts,btnv->bsnv", p, g)
    dp = jnp.einsum("btnv,bsnv->bnts", g, vn)
    delta = (g * out).sum(-1).transpose(0, 2, 1)[..., None]
    delta = delta - dlse[..., None]
    ds = p * (dp - delta)
    if soft_cap is not None:
        ds = jnp.where(ok, ds * (1.0 - (z / soft_cap) ** 2), 0.0)
    dsinks = None
    if sinks is not None:
        dsinks = -(jnp.exp(sinks.astype(F32)[:, None, None] - safe) * delta).sum((0, 2, 3)).astype(sinks.dtype)
    dbias = None
    if bias is not None:
        along = tuple(axis for axis in range(4) if bias.shape[axis] == 1)
        dbias = ds.sum(along, keepdims=True).astype(bias.dtype)
    dq = scale * jnp.einsum("bnts,bsnh->btnh", ds, kn)
    dk = scale * jnp.einsum("bnts,btnh->bsnh", ds, q)
    dk = dk.reshape(b, s, kv_heads, group, h).sum(3)
    dv = dv.reshape(b, s, kv_heads, group, v.shape[-1]).sum(3)
    return dq, dk, dv, dsinks, dbias, None


attend.defvjp(kept, backward)


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
    seen = ok.reshape(b, kv_heads, n // kv_heads, t, s).any((2, 3)).transpose(0, 2, 1)[..., None]  # [B, S, K, 1]
    kf, vf = jnp.where(seen, k.astype(F32), 0.0), jnp.where(seen, v.astype(F32), 0.0)
    marks = (mask, segment_ids)
    out, lse, top = attend(q.astype(F32), kf, vf, sinks, bias, marks, (causal, window), soft_cap, scale)
    out = out.astype(q.dtype)
    return (out, {"logsumexp": lse, "max_logits": top}) if save_residuals else out
