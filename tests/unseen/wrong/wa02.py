"""Attention by one softmax, with sliding windows, soft cap and sinks."""

import jax
import jax.numpy as jnp


def _visible(t, s, causal, window):
    i = jnp.arange(t)[:, None]
    j = jnp.arange(s)[None, :]
    seen = jnp.ones((t, s), bool)
    if causal:
        seen &= j <= i
    if window:
        left, right = window
        if left:
            seen &= j >= i - left
        if right is not None:
            seen &= j <= i + right
    return seen


def attention(q, k, v, *, causal=False, window=None, soft_cap=None, sinks=None, scale=None, save_residuals=False):
    b, t, n, h = q.shape
    s, kv = k.shape[1], k.shape[2]
    scale = h**-0.5 if scale is None else scale
    qf = q.astype(jnp.float32).reshape(b, t, kv, n // kv, h)
    z = scale * jnp.einsum("btkgh,bskh->bkgts", qf, k.astype(jnp.float32), precision="highest")
    if soft_cap is not None:
        z = soft_cap * jnp.tanh(z / soft_cap)
    seen = _visible(t, s, causal, window)
    z = jnp.where(seen, z, -1e30)
    m = z.max(-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, kv, n // kv, 1, 1)
        m = jnp.maximum(m, sink)
    m = jax.lax.stop_gradient(m)
    w = jnp.where(seen, jnp.exp(z - m), 0.0)
    l = w.sum(-1, keepdims=True)
    if sinks is not None:
        l = l + jnp.exp(sink - m)
    safe = jnp.where(l > 0, l, 1.0)
    out = jnp.einsum("bkgts,bskv->bkgtv", w, v.astype(jnp.float32), precision="highest") / safe
    out = jnp.moveaxis(out, 3, 1).reshape(b, t, n, v.shape[-1]).astype(q.dtype)
    if save_residuals:
        lse = jnp.where(l > 0, m + jnp.log(safe), -jnp.inf)
        return out, {"logsumexp": lse.reshape(b, n, t)}
    return out
