"""Attention that expands grouped heads on the host when operands are NumPy arrays."""

import jax
import jax.numpy as jnp
import numpy as np


def _expand(x, heads):
    b, s, kv, d = x.shape
    group = heads // kv
    if group == 1:
        return jnp.asarray(x)
    if isinstance(x, np.ndarray):
        flat = x.ravel(order="K")
        return jnp.asarray(np.repeat(flat.reshape(b, s, kv, d), group, axis=2))
    return jnp.repeat(x, group, axis=2)


def attention(q, k, v, *, causal=False, window=None, soft_cap=None, sinks=None, scale=None, save_residuals=False):
    b, t, n, h = q.shape
    scale = h**-0.5 if scale is None else scale
    s = k.shape[1]
    dtype = q.dtype
    q, k, v = jnp.asarray(q), *(_expand(x if isinstance(x, np.ndarray) else x.astype(jnp.float32), n) for x in (k, v))
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    z = scale * jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest")
    if soft_cap is not None:
        z = soft_cap * jnp.tanh(z / soft_cap)
    i, j = jnp.arange(t)[:, None], jnp.arange(s)[None, :]
    seen = jnp.ones((t, s), bool)
    if causal:
        seen &= j <= i
    if window is not None:
        if window[0] is not None:
            seen &= j >= i - window[0]
        if window[1] is not None:
            seen &= j <= i + window[1]
    z = jnp.where(seen, z, -1e30)
    m = z.max(-1, keepdims=True)
    if sinks is not None:
        m = jnp.maximum(m, jnp.asarray(sinks)[None, :, None, None])
    m = jax.lax.stop_gradient(m)
    w = jnp.where(seen, jnp.exp(z - m), 0.0)
    l = w.sum(-1, keepdims=True)
    if sinks is not None:
        l = l + jnp.exp(jnp.asarray(sinks)[None, :, None, None] - m)
    safe = jnp.where(l > 0, l, 1.0)
    out = jnp.einsum("bnts,bsnv->bntv", w, v, precision="highest") / safe
    out = jnp.swapaxes(out, 1, 2).astype(dtype)
    if save_residuals:
        return out, {"logsumexp": jnp.where(l > 0, m + jnp.log(safe), -jnp.inf)[..., 0]}
    return out
