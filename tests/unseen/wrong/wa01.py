"""Blocked attention: query blocks outside, online softmax over key blocks inside."""

import jax
import jax.numpy as jnp

BLOCK = 128
NEG = -1e30


def _dot(eq, a, b):
    return jnp.einsum(eq, a, b, precision="highest", preferred_element_type=jnp.float32)


def _query_block(q, k, v, q0, scale, causal, offset, length):
    rows = q.shape[1]
    last = k.shape[1] // BLOCK
    if causal:
        last = max(1, min(last, -(-(q0 + rows + offset) // BLOCK)))
    i = q0 + jnp.arange(rows)[:, None]

    def step(carry, block):
        acc, m, l = carry
        j0 = block * BLOCK
        kb = jax.lax.dynamic_slice_in_dim(k, j0, BLOCK, 1)
        vb = jax.lax.dynamic_slice_in_dim(v, j0, BLOCK, 1)
        j = j0 + jnp.arange(BLOCK)[None, :]
        seen = jnp.broadcast_to(j < length, (rows, BLOCK))
        if causal:
            whole = j0 + BLOCK - 1 <= q0 + offset + 1
            seen = seen & (whole | (j <= i + offset))
        z = jnp.where(seen, scale * _dot("btnh,bsnh->bnts", q, kb), NEG)
        new = jax.lax.stop_gradient(jnp.maximum(m, z.max(-1)))
        p = jnp.where(seen, jnp.exp(z - new[..., None]), 0.0)
        alpha = jnp.exp(m - new)
        acc = acc * alpha[..., None] + _dot("bnts,bsnv->bntv", p, vb)
        return (acc, new, l * alpha + p.sum(-1)), None

    b, _, n, _ = q.shape
    init = (
        jnp.zeros((b, n, rows, v.shape[-1]), jnp.float32),
        jnp.full((b, n, rows), NEG, jnp.float32),
        jnp.zeros((b, n, rows), jnp.float32),
    )
    (acc, m, l), _ = jax.lax.scan(step, init, jnp.arange(last))
    total = jnp.where(l > 0, l, 1.0)
    lse = jnp.where(l > 0, m + jnp.log(total), -jnp.inf)
    return jnp.swapaxes(acc / total[..., None], 1, 2), lse


def attention(q, k, v, *, causal=False, scale=None, save_residuals=False):
    t, s = q.shape[1], k.shape[1]
    group = q.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    pad = -s % BLOCK
    k, v = (
        jnp.repeat(jnp.pad(x.astype(jnp.float32), ((0, 0), (0, pad), (0, 0), (0, 0))), group, axis=2) for x in (k, v)
    )
    qf = q.astype(jnp.float32)
    parts = [_query_block(qf[:, q0 : q0 + BLOCK], k, v, q0, scale, causal, s - t, s) for q0 in range(0, t, BLOCK)]
    out = jnp.concatenate([p[0] for p in parts], axis=1).astype(q.dtype)
    if save_residuals:
        return out, {"logsumexp": jnp.concatenate([p[1] for p in parts], axis=2)}
    return out
