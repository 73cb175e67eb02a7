"""Sparse attention by index lists. Every row gathers its own keys and values."""

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


def visible(q, k, causal=False, window=None, mask=None, segment_ids=None):
    b, t, n, s = q.shape[0], q.shape[1], q.shape[2], k.shape[1]
    at = jnp.arange(t, dtype=jnp.int32)[:, None]
    j = jnp.arange(s, dtype=jnp.int32)[None, :]
    seen = jnp.ones((1, 1, t, s), bool)
    if causal:
        seen &= j <= at
    if window is not None:
        left, right = window
        if left is not None:
            seen &= j >= at - left
        if right is not None:
            seen &= j <= at + right
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
    window=None,
    mask=None,
    segment_ids=None,
    sinks=None,
    bias=None,
    scale=None,
    save_residuals=False,
):
    b, t, n, h = q.shape
    s, heads, d = k.shape[1], k.shape[2], v.shape[-1]
    g = n // heads
    scale = h**-0.5 if scale is None else scale
    seen = visible(q, k, causal=causal, window=window, mask=mask, segment_ids=segment_ids)
    kf, vf = (jnp.repeat(clear(x, seen).swapaxes(1, 2), g, axis=1) for x in (k, v))
    order = jnp.argsort(~seen, axis=-1, stable=True).astype(jnp.int32)
    count = seen.sum(-1, dtype=jnp.int32)
    qf = q.astype(jnp.float32)
    if bias is not None:
        bias = jnp.broadcast_to(bias.astype(jnp.float32), (b, n, t, s))

    @jax.checkpoint
    def row(operands):
        qi, index, filled, extra = operands
        kj = jnp.take_along_axis(kf, index[..., None], axis=2)
        vj = jnp.take_along_axis(vf, index[..., None], axis=2)
        ok = jnp.arange(s, dtype=jnp.int32) < filled[..., None]
        x = jnp.einsum("bnh,bnsh->bns", qi, kj, precision=HIGHEST) * scale
        if extra is not None:
            x = x + jnp.take_along_axis(extra, index, axis=-1)
        x = jnp.where(ok, x, -jnp.inf)
        top = jax.lax.stop_gradient(x.max(-1))
        m = top
        if sinks is not None:
            m = jnp.maximum(m, jax.lax.stop_gradient(sinks.astype(jnp.float32)))
        m = jnp.where(m == -jnp.inf, 0, m)
        e = jnp.where(ok, jnp.exp(x - m[..., None]), 0)
        l = e.sum(-1)
        if sinks is not None:
            l = l + jnp.exp(sinks.astype(jnp.float32) - m)
        empty = l == 0
        l = jnp.where(empty, 1, l)
        o = jnp.einsum("bns,bnsv->bnv", e, vj, precision=HIGHEST) / l[..., None]
        return o, jnp.where(empty, -jnp.inf, m + jnp.log(l)), top

    rows = (
        jnp.moveaxis(qf, 1, 0),
        jnp.moveaxis(order, 2, 0),
        jnp.moveaxis(count, 2, 0),
        None if bias is None else jnp.moveaxis(bias, 2, 0),
    )
    o, lse, top = jax.lax.map(row, rows)
    out = jnp.moveaxis(o, 0, 1).astype(q.dtype)
    if save_residuals:
        return out, {"logsumexp": jnp.moveaxis(lse, 0, 2), "max_logits": jnp.moveaxis(top, 0, 2)}
    return out
