"""Split decoding: the cache is cut into splits, whose partial results are merged at the end."""

import jax
import jax.numpy as jnp

SPLIT = 64


def attention(q, k, v, *, kv_lengths=None, sinks=None, soft_cap=None, scale=None, save_residuals=False):
    b, t, n, h = q.shape
    s, kv = k.shape[1], k.shape[2]
    scale = h**-0.5 if scale is None else scale
    lengths = jnp.full((b,), s, jnp.int32) if kv_lengths is None else jnp.asarray(kv_lengths)
    qf = q.astype(jnp.float32).reshape(b, t, kv, n // kv, h)
    pad = -s % SPLIT
    splits = (s + pad) // SPLIT

    def cut(x):
        x = jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0)))
        return jnp.moveaxis(x.reshape(b, splits, SPLIT, *x.shape[2:]), 1, 0)

    def partial(xs):
        kb, vb, j0 = xs
        seen = j0 + jnp.arange(SPLIT) < lengths[:, None]
        kb, vb = (jnp.where(seen[:, :, None, None], x, 0).astype(jnp.float32) for x in (kb, vb))
        z = scale * jnp.einsum("btkgh,bskh->bkgts", qf, kb, precision="highest")
        if soft_cap is not None:
            z = soft_cap * jnp.tanh(z / soft_cap)
        seen = seen[:, None, None, None]
        z = jnp.where(seen, z, -1e30)
        m = jax.lax.stop_gradient(z.max(-1))
        w = jnp.where(seen, jnp.exp(z - m[..., None]), 0.0)
        acc = jnp.einsum("bkgts,bskv->bkgtv", w, vb, precision="highest")
        return acc.astype(q.dtype), m, w.sum(-1)

    acc, m, l = jax.lax.map(partial, (cut(k), cut(v), jnp.arange(splits) * SPLIT))
    top = m.max(0)
    sink = None if sinks is None else sinks.reshape(1, kv, n // kv, 1)
    if sinks is not None:
        top = jax.lax.stop_gradient(jnp.maximum(top, sink))
    factor = jnp.exp(m - top)
    total = (factor * l).sum(0)
    if sinks is not None:
        total = total + jnp.exp(sink - top)
    safe = jnp.where(total > 0, total, 1.0)
    out = (factor[..., None] * acc.astype(jnp.float32)).sum(0) / safe[..., None]
    out = jnp.moveaxis(out, 3, 1).reshape(b, t, n, v.shape[-1]).astype(q.dtype)
    if save_residuals:
        lse = jnp.where(total > 0, top + jnp.log(safe), -jnp.inf)
        return out, {"logsumexp": lse.reshape(b, n, t)}
    return out
