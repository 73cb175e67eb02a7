"""Logits accumulate over chunks of the depth; one query head at a time."""

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


def visible(q, k, causal=False, window=None, mask=None, segment_ids=None):
    b, t, n, s = q.shape[0], q.shape[1], q.shape[2], k.shape[1]
    at = jnp.arange(t, dtype=jnp.int32)[:, None]
    j = jnp.arange(s, dtype=jnp.int32)[None, :]
    seen = jnp.ones((1, 1, t, s), bool)
    if causal:
        seen &= j <= at
    if window is not None:
        left, right = window
        if left is not None:
            seen &= j >= at - left
        if right is not None:
            seen &= j <= at + right
    if segment_ids is not None:
        ids_q, ids_k = segment_ids
        seen = seen & (ids_q[:, None, :, None] == ids_k[:, None, None, :])
    if mask is not None:
        seen = seen & mask
    return jnp.broadcast_to(seen, (b, n, t, s))


def attention(
    q,
    k,
    v,
    *,
    causal=False,
    window=None,
    mask=None,
    segment_ids=None,
    soft_cap=None,
    bias=None,
    logit_scale=None,
    scale=None,
    depth_chunk=8,
):
    b, t, n, h = q.shape
    s, heads, d = k.shape[1], k.shape[2], v.shape[-1]
    g = n // heads
    scale = h**-0.5 if scale is None else scale
    seen = visible(q, k, causal=causal, window=window, mask=mask, segment_ids=segment_ids)
    live = seen.reshape(b, heads, g * t, s).any(2)
    if bias is not None:
        bias = jnp.broadcast_to(bias.astype(jnp.float32), (b, n, t, s))
    outs = []
    for head in range(n):
        alive = live[:, head // g, :, None]
        kh = jnp.where(alive, k[:, :, head // g], 0).astype(jnp.float32)
        vh = jnp.where(alive, v[:, :, head // g], 0).astype(jnp.float32)
        qh = q[:, :, head].astype(jnp.float32)
        ok = seen[:, head]
        x = jnp.zeros((b, t, s), jnp.float32)
        for start in range(0, h, depth_chunk):
            part = slice(start, min(start + depth_chunk, h))
            x = x + jnp.einsum("bth,bsh->bts", qh[..., part], kh[..., part], precision=HIGHEST)
        x = x * scale
        if logit_scale is not None:
            x = x * logit_scale[head].astype(jnp.float32)
        if bias is not None:
            x = x + bias[:, head]
        x = jnp.where(ok, x, 0)
        if soft_cap is not None:
            x = soft_cap * jnp.tanh(x / soft_cap)
        x = jnp.where(ok, x, -jnp.inf)
        m = jax.lax.stop_gradient(x.max(-1, keepdims=True))
        e = jnp.where(ok, jnp.exp(x - jnp.where(m == -jnp.inf, 0, m)), 0)
        l = e.sum(-1, keepdims=True)
        outs.append(jnp.einsum("bts,bsv->btv", e, vh, precision=HIGHEST) / jnp.where(l == 0, 1, l))
    return jnp.stack(outs, axis=2).astype(q.dtype)
