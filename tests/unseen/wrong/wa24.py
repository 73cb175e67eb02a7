"""Attention over a cache with lengths, with a short path for single-token decoding."""

import jax
import jax.numpy as jnp


def _softmax(z, seen, v, dtype):
    z = jnp.where(seen, z, -1e30)
    m = jax.lax.stop_gradient(z.max(-1, keepdims=True))
    w = jnp.where(seen, jnp.exp(z - m), 0.0)
    l = w.sum(-1, keepdims=True)
    safe = jnp.where(l > 0, l, 1.0)
    lse = jnp.where(l > 0, m + jnp.log(safe), -jnp.inf)[..., 0]
    out = jnp.einsum("bkgts,bskv->btkgv", w / safe, v, precision="highest")
    return out.astype(dtype), lse


def attention(q, k, v, *, causal=False, kv_lengths=None, soft_cap=None, scale=None, save_residuals=False):
    b, t, n, h = q.shape
    s, kv = k.shape[1], k.shape[2]
    scale = h**-0.5 if scale is None else scale
    j = jnp.arange(s)
    live = jnp.ones((b, s), bool) if kv_lengths is None else j < jnp.asarray(kv_lengths)[:, None]
    if causal and t > 1:
        live = live & (j < t)
    k, v = (jnp.where(live[:, :, None, None], x, 0).astype(jnp.float32) for x in (k, v))
    qf = q.astype(jnp.float32).reshape(b, t, kv, n // kv, h)
    z = scale * jnp.einsum("btkgh,bskh->bkgts", qf, k, precision="highest")
    if soft_cap is not None:
        z = soft_cap * jnp.tanh(z / soft_cap)
    seen = live[:, None, None, None, :]
    if causal and t > 1:
        seen = seen & (j <= jnp.arange(t)[:, None])
    out, lse = _softmax(z, seen, v, q.dtype)
    out = out.reshape(b, t, n, v.shape[-1])
    return (out, {"logsumexp": lse.reshape(b, n, t)}) if save_residuals else out
