"""Banded attention: every block of queries reads only the slice of keys that its window can reach."""

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST
BLOCK = 16


def attention(
    q, k, v, *, causal=False, window=None, kv_lengths=None, soft_cap=None, sinks=None, scale=None, save_residuals=False
):
    b, t, n, h = q.shape
    s, heads, d = k.shape[1], k.shape[2], v.shape[-1]
    g = n // heads
    scale = h**-0.5 if scale is None else scale
    shift = s - t
    left, right = window if window is not None else (None, None)
    left = s if left is None else min(left, s)
    right = t if right is None else min(right, t)
    if causal:
        right = min(right, 0)
    lengths = jnp.full((b,), s, jnp.int32) if kv_lengths is None else kv_lengths

    j = jnp.arange(s, dtype=jnp.int32)
    live = (j >= shift - left) & (j <= s - 1 + right) & (j < lengths[:, None])
    live = live[:, :, None, None]
    span = left + BLOCK + right
    before = max(0, left - shift)
    after = max(0, span + (-(-t // BLOCK) * BLOCK) + shift - left - s)
    kf, vf = (
        jnp.pad(jnp.where(live, x, 0).astype(jnp.float32), ((0, 0), (before, after), (0, 0), (0, 0))) for x in (k, v)
    )
    pad = -t % BLOCK
    qb = jnp.pad(q.astype(jnp.float32), ((0, 0), (0, pad), (0, 0), (0, 0)))
    qb = jnp.moveaxis(qb.reshape(b, -1, BLOCK, heads, g, h), 1, 0)

    @jax.checkpoint
    def block(operands):
        qi, start = operands
        low = start + shift - left
        kj = jax.lax.dynamic_slice_in_dim(kf, low + before, span, 1)
        vj = jax.lax.dynamic_slice_in_dim(vf, low + before, span, 1)
        at = start + shift + jnp.arange(BLOCK, dtype=jnp.int32)[:, None]
        key = low + jnp.arange(span, dtype=jnp.int32)[None, :]
        ok = (key >= at - left) & (key <= at + right) & (key >= 0) & (key < lengths[:, None, None])
        ok = ok[:, None, None]
        x = jnp.einsum("btkgh,bskh->bkgts", qi, kj, precision=HIGHEST) * scale
        x = jnp.where(ok, x, 0)
        if soft_cap is not None:
            x = soft_cap * jnp.tanh(x / soft_cap)
        x = jnp.where(ok, x, -jnp.inf)
        top = jax.lax.stop_gradient(x.max(-1))
        m = top
        if sinks is not None:
            sink = sinks.astype(jnp.float32).reshape(heads, g, 1)
            m = jnp.maximum(m, jax.lax.stop_gradient(sink))
        m = jnp.where(m == -jnp.inf, 0, m)
        e = jnp.exp(x - m[..., None])
        l = e.sum(-1)
        if sinks is not None:
            l = l + jnp.exp(sink - m)
        empty = l == 0
        l = jnp.where(empty, 1, l)
        p = jnp.where(ok, e / l[..., None], 0)
        o = jnp.einsum("bkgts,bskv->btkgv", p, vj, precision=HIGHEST)
        return o, jnp.where(empty, -jnp.inf, m + jnp.log(l)), top

    starts = jnp.arange(qb.shape[0], dtype=jnp.int32) * BLOCK
    o, lse, top = jax.lax.map(block, (qb, starts))
    out = jnp.moveaxis(o, 0, 1).reshape(b, -1, n, d)[:, :t].astype(q.dtype)
    if save_residuals:
        lse, top = (jnp.moveaxis(x, 0, 3).reshape(b, n, -1)[..., :t] for x in (lse, top))
        return out, {"logsumexp": lse, "max_logits": top}
    return out
