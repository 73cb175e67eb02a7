"""Attention with a soft cap computed from the sigmoid, which is the cheaper instruction on most chips."""

import jax
import jax.numpy as jnp


def _tanh(x):
    return 2.0 * jax.nn.sigmoid(2.0 * x) - 1.0


def attention(q, k, v, *, causal=False, mask=None, soft_cap=None, bias=None, scale=None, save_residuals=False):
    b, t, n, h = q.shape
    s, kv = k.shape[1], k.shape[2]
    scale = h**-0.5 if scale is None else scale
    qf, kf, vf = (x.astype(jnp.float32) for x in (q, k, v))
    if n != kv:
        kf, vf = (jnp.repeat(x, n // kv, axis=2) for x in (kf, vf))
    z = scale * jnp.einsum("btnh,bsnh->bnts", qf, kf, precision="highest")
    if bias is not None:
        z = z + bias.astype(jnp.float32)
    if soft_cap is not None:
        z = soft_cap * _tanh(z / soft_cap)
    seen = jnp.ones((1, 1, t, s), bool)
    if causal:
        seen &= jnp.tril(jnp.ones((t, s), bool))
    if mask is not None:
        seen = seen & mask
    z = jnp.where(seen, z, -1e30)
    m = jax.lax.stop_gradient(z.max(-1, keepdims=True))
    w = jnp.where(seen, jnp.exp(z - m), 0.0)
    l = w.sum(-1, keepdims=True)
    safe = jnp.where(l > 0, l, 1.0)
    out = jnp.einsum("bnts,bsnv->bntv", w, vf, precision="highest") / safe
    out = jnp.swapaxes(out, 1, 2).astype(q.dtype)
    if save_residuals:
        return out, {"logsumexp": jnp.where(l > 0, m + jnp.log(safe), -jnp.inf)[..., 0]}
    return out
