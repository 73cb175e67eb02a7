"""FlexAttention style: the mask and the score are functions of places, called for each block of queries."""

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


def attention(
    q,
    k,
    v,
    *,
    mask_mod=None,
    score_mod=None,
    segment_ids=None,
    bias=None,
    sinks=None,
    scale=None,
    save_residuals=False,
    block=20,
):
    b, t, n, h = q.shape
    s, heads, d = k.shape[1], k.shape[2], v.shape[-1]
    g = n // heads
    scale = h**-0.5 if scale is None else scale
    count = -(-t // block)
    pad = count * block - t
    row, head = jnp.arange(b)[:, None, None, None], jnp.arange(n)[:, None, None]
    key = jnp.arange(s)[None, :]
    ids = None if segment_ids is None else jnp.pad(segment_ids[0], ((0, 0), (0, pad)))

    def places(start):
        i = start + jnp.arange(block)[:, None]
        ok = jnp.broadcast_to(i < t, (b, n, block, s))
        if mask_mod is not None:
            ok = ok & mask_mod(row, head, jnp.minimum(i, t - 1), key)
        if ids is not None:
            here = jax.lax.dynamic_slice_in_dim(ids, start, block, 1)
            ok = ok & (here[:, None, :, None] == segment_ids[1][:, None, None, :])
        return jnp.minimum(i, t - 1), ok

    starts = jnp.arange(count) * block
    live = jax.lax.map(lambda start: places(start)[1].reshape(b, heads, g * block, s).any(2), starts).any(0)
    live = live.swapaxes(1, 2)[..., None]
    kf, vf = (jnp.where(live, x, 0).astype(jnp.float32) for x in (k, v))
    qb = jnp.pad(q.astype(jnp.float32), ((0, 0), (0, pad), (0, 0), (0, 0)))
    qb = jnp.moveaxis(qb.reshape(b, count, block, heads, g, h), 1, 0)
    extra = None
    if bias is not None:
        extra = jnp.pad(jnp.broadcast_to(bias.astype(jnp.float32), (b, n, t, s)), ((0, 0), (0, 0), (0, pad), (0, 0)))
        extra = jnp.moveaxis(extra.reshape(b, n, count, block, s), 2, 0)

    @jax.checkpoint
    def rows(qi, start, add, kf, vf, sinks):
        i, ok = places(start)
        x = jnp.einsum("btkgh,bskh->bkgts", qi, kf, precision=HIGHEST).reshape(b, n, block, s) * scale
        if add is not None:
            x = x + add
        x = jnp.where(ok, x, 0)
        if score_mod is not None:
            x = score_mod(x, row, head, i, key)
        x = jnp.where(ok, x, -jnp.inf)
        top = jax.lax.stop_gradient(x.max(-1))
        m = top
        if sinks is not None:
            sink = sinks.astype(jnp.float32)[:, None]
            m = jnp.maximum(m, jax.lax.stop_gradient(sink))
        m = jnp.where(m == -jnp.inf, 0, m)
        e = jnp.exp(x - m[..., None])
        l = e.sum(-1) if sinks is None else e.sum(-1) + jnp.exp(sink - m)
        empty = l == 0
        l = jnp.where(empty, 1, l)
        p = jnp.where(ok, e / l[..., None], 0)
        o = jnp.einsum("bkgts,bskv->btkgv", p.reshape(b, heads, g, block, s), vf, precision=HIGHEST)
        return o, jnp.where(empty, -jnp.inf, m + jnp.log(l)), top

    o, lse, top = jax.lax.map(lambda operands: rows(*operands, kf, vf, sinks), (qb, starts, extra))
    out = jnp.moveaxis(o, 0, 1).reshape(b, -1, n, d)[:, :t].astype(q.dtype)
    if save_residuals:
        lse, top = (jnp.moveaxis(x, 0, 2).reshape(b, n, -1)[..., :t] for x in (lse, top))
        return out, {"logsumexp": lse, "max_logits": top}
    return out
