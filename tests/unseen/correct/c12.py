"""One block of queries at a time. Normalised probabilities enter the product with v in v's dtype."""

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


def visible(q, k, causal=False, mask=None, segment_ids=None):
    b, t, n, s = q.shape[0], q.shape[1], q.shape[2], k.shape[1]
    at = jnp.arange(t, dtype=jnp.int32)[:, None]
    j = jnp.arange(s, dtype=jnp.int32)[None, :]
    seen = jnp.ones((1, 1, t, s), bool)
    if causal:
        seen &= j <= at
    if segment_ids is not None:
        ids_q, ids_k = segment_ids
        seen = seen & (ids_q[:, None, :, None] == ids_k[:, None, None, :])
    if mask is not None:
        seen = seen & mask
    return jnp.broadcast_to(seen, (b, n, t, s))


def clear(x, seen):
    """Zero rows of keys or values that no query of their group sees, in float32."""
    b, n, t, s = seen.shape
    live = seen.reshape(b, x.shape[2], -1, s).any(2)
    return jnp.where(live.swapaxes(1, 2)[..., None], x, 0).astype(jnp.float32)


def attention(
    q,
    k,
    v,
    *,
    causal=False,
    mask=None,
    segment_ids=None,
    soft_cap=None,
    sinks=None,
    scale=None,
    save_residuals=False,
    block=24,
):
    b, t, n, h = q.shape
    s, heads, d = k.shape[1], k.shape[2], v.shape[-1]
    g = n // heads
    scale = h**-0.5 if scale is None else scale
    seen = visible(q, k, causal=causal, mask=mask, segment_ids=segment_ids)
    kf, vf = clear(k, seen), clear(v, seen)
    pad = -t % block
    qb = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0))).astype(jnp.float32)
    qb = jnp.moveaxis(qb.reshape(b, -1, block, heads, g, h), 1, 0)
    ok = jnp.pad(seen, ((0, 0), (0, 0), (0, pad), (0, 0))).reshape(b, heads, g, -1, block, s)
    ok = jnp.moveaxis(ok, 3, 0)

    def rows(_, operands):
        qi, oki = operands
        x = jnp.einsum("btkgh,bskh->bkgts", qi, kf, precision=HIGHEST) * scale
        x = jnp.where(oki, x, 0)
        if soft_cap is not None:
            x = jnp.tanh(x / soft_cap) * soft_cap
        x = jnp.where(oki, x, -jnp.inf)
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
        p = jnp.where(oki, (e / l[..., None]).astype(v.dtype).astype(jnp.float32), 0)
        o = jnp.einsum("bkgts,bskv->btkgv", p, vf, precision=HIGHEST).astype(q.dtype)
        return None, (o, jnp.where(empty, -jnp.inf, m + jnp.log(l)), top)

    _, (o, lse, top) = jax.lax.scan(rows, None, (qb, ok))
    out = jnp.moveaxis(o, 0, 1).reshape(b, -1, n, d)[:, :t]
    if save_residuals:
        lse, top = (jnp.moveaxis(x, 0, 3).reshape(b, n, -1)[..., :t] for x in (lse, top))
        return out, {"logsumexp": lse, "max_logits": top}
    return out
