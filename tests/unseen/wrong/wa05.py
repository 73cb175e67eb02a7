"""Scan over key blocks with segment ids; the last block is padded with a sentinel id."""

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 64
NO_SEGMENT = np.iinfo(np.int32).min


def attention(q, k, v, *, causal=False, segment_ids=None, soft_cap=None, scale=None, save_residuals=False):
    b, t, n, h = q.shape
    s, kv = k.shape[1], k.shape[2]
    g = n // kv
    scale = h**-0.5 if scale is None else scale
    if segment_ids is None:
        q_ids, k_ids = jnp.zeros((b, t), jnp.int32), jnp.zeros((b, s), jnp.int32)
    else:
        q_ids, k_ids = (jnp.asarray(x) for x in segment_ids)
    pad = -s % BLOCK
    count = (s + pad) // BLOCK
    k_ids = jnp.pad(k_ids, ((0, 0), (0, pad)), constant_values=NO_SEGMENT)

    def blocks(x):
        x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, pad), (0, 0), (0, 0)))
        return jnp.moveaxis(x.reshape(b, count, BLOCK, *x.shape[2:]), 1, 0)

    ids = jnp.moveaxis(k_ids.reshape(b, count, BLOCK), 1, 0)
    qf = q.astype(jnp.float32).reshape(b, t, kv, g, h)
    i = jnp.arange(t)[:, None]

    def step(carry, xs):
        acc, m, l = carry
        kb, vb, idb, j0 = xs
        z = scale * jnp.einsum("btkgh,bskh->bkgts", qf, kb, precision="highest")
        if soft_cap is not None:
            z = soft_cap * jnp.tanh(z / soft_cap)
        seen = q_ids[:, :, None] == idb[:, None, :]
        if causal:
            seen &= (j0 + jnp.arange(BLOCK))[None, :] <= i
        seen = seen[:, None, None]
        z = jnp.where(seen, z, -1e30)
        new = jax.lax.stop_gradient(jnp.maximum(m, z.max(-1)))
        p = jnp.where(seen, jnp.exp(z - new[..., None]), 0.0)
        alpha = jnp.exp(m - new)
        acc = acc * alpha[..., None] + jnp.einsum("bkgts,bskv->bkgtv", p, vb, precision="highest")
        return (acc, new, l * alpha + p.sum(-1)), None

    init = (
        jnp.zeros((b, kv, g, t, v.shape[-1]), jnp.float32),
        jnp.full((b, kv, g, t), -1e30, jnp.float32),
        jnp.zeros((b, kv, g, t), jnp.float32),
    )
    (acc, m, l), _ = jax.lax.scan(step, init, (blocks(k), blocks(v), ids, jnp.arange(count) * BLOCK))
    total = jnp.where(l > 0, l, 1.0)
    out = jnp.moveaxis(acc / total[..., None], 3, 1).reshape(b, t, n, v.shape[-1]).astype(q.dtype)
    if save_residuals:
        lse = jnp.where(l > 0, m + jnp.log(total), -jnp.inf)
        return out, {"logsumexp": lse.reshape(b, n, t)}
    return out
