"""Backward pass over pairs of blocks, one diagonal of the grid after the other."""

from functools import partial

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST
BLOCK = 32


def visible(q, k, causal=False, window=None, mask=None, segment_ids=None, shift=0):
    b, t, n, s = q.shape[0], q.shape[1], q.shape[2], k.shape[1]
    at = jnp.arange(t, dtype=jnp.int32)[:, None] + shift
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


def tile_logits(q, k, ok, scale, soft_cap):
    x = scale * jnp.einsum("bkgth,bksh->bkgts", q, k, precision=HIGHEST)
    x = jnp.where(ok, x, 0)
    slope = jnp.ones_like(x)
    if soft_cap is not None:
        y = jnp.tanh(x / soft_cap)
        x, slope = soft_cap * y, 1 - y * y
    return jnp.where(ok, x, -jnp.inf), slope


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def padded(q, k, v, sinks, ok, scale, soft_cap):
    return forward(q, k, v, sinks, ok, scale, soft_cap)[0]


def forward(q, k, v, sinks, ok, scale, soft_cap):
    def row_block(operands):
        qi, oki = operands
        z, _ = tile_logits(qi, k, oki, scale, soft_cap)
        top = jax.lax.stop_gradient(z.max(-1))
        m = top if sinks is None else jnp.maximum(top, jax.lax.stop_gradient(sinks)[None, :, :, None])
        m = jnp.where(m == -jnp.inf, 0, m)
        e = jnp.where(oki, jnp.exp(z - m[..., None]), 0)
        l = e.sum(-1) + (0 if sinks is None else jnp.exp(sinks[None, :, :, None] - m))
        empty = l == 0
        l = jnp.where(empty, 1, l)
        o = jnp.einsum("bkgts,bksv->bkgtv", e, v, precision=HIGHEST) / l[..., None]
        return o, jnp.where(empty, -jnp.inf, m + jnp.log(l)), top

    b, heads, g, t, h = q.shape
    n = t // BLOCK
    qs = jnp.moveaxis(q.reshape(b, heads, g, n, BLOCK, h), 3, 0)
    oks = jnp.moveaxis(ok.reshape(b, heads, g, n, BLOCK, -1), 3, 0)
    o, lse, top = jax.lax.map(row_block, (qs, oks))
    o = jnp.moveaxis(o, 0, 3).reshape(b, heads, g, t, -1)
    lse, top = (jnp.moveaxis(x, 0, 3).reshape(b, heads, g, t) for x in (lse, top))
    return (o, lse, top), (q, k, v, sinks, ok, o, lse)


def backward(scale, soft_cap, saved, cotangents):
    q, k, v, sinks, ok, o, lse = saved
    do, dlse, _ = cotangents
    delta = (do * o).sum(-1) - dlse
    shift = jnp.where(lse == -jnp.inf, 0, lse)
    rows, columns = q.shape[3] // BLOCK, k.shape[2] // BLOCK
    pairs = sorted(((i, j) for i in range(rows) for j in range(columns)), key=lambda ij: (ij[1] - ij[0], ij[0]))

    def add(x, part, start, axis):
        old = jax.lax.dynamic_slice_in_dim(x, start, BLOCK, axis)
        return jax.lax.dynamic_update_slice_in_dim(x, old + part, start, axis)

    def pair(carry, ij):
        dq, dk, dv = carry
        i, j = ij[0] * BLOCK, ij[1] * BLOCK
        qi, doi = (jax.lax.dynamic_slice_in_dim(x, i, BLOCK, 3) for x in (q, do))
        deltai, shifti = (jax.lax.dynamic_slice_in_dim(x, i, BLOCK, 3) for x in (delta, shift))
        kj, vj = (jax.lax.dynamic_slice_in_dim(x, j, BLOCK, 2) for x in (k, v))
        okij = jax.lax.dynamic_slice_in_dim(jax.lax.dynamic_slice_in_dim(ok, i, BLOCK, 3), j, BLOCK, 4)
        z, slope = tile_logits(qi, kj, okij, scale, soft_cap)
        p = jnp.exp(z - shifti[..., None])
        dp = jnp.einsum("bkgtv,bksv->bkgts", doi, vj, precision=HIGHEST)
        dx = jnp.where(okij, p * (dp - deltai[..., None]) * slope, 0)
        dq = add(dq, jnp.einsum("bkgts,bksh->bkgth", dx, kj, precision=HIGHEST), i, 3)
        dk = add(dk, jnp.einsum("bkgts,bkgth->bksh", dx, qi, precision=HIGHEST), j, 2)
        dv = add(dv, jnp.einsum("bkgts,bkgtv->bksv", p, doi, precision=HIGHEST), j, 2)
        return (dq, dk, dv), None

    start = (jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v))
    (dq, dk, dv), _ = jax.lax.scan(pair, start, jnp.asarray(pairs, jnp.int32))
    dsinks = None
    if sinks is not None:
        dsinks = -(jnp.exp(sinks[None, :, :, None] - shift) * delta).sum((0, 3))
        dsinks = jnp.where(sinks == -jnp.inf, 0, dsinks)
    return dq * scale, dk * scale, dv, dsinks, None


padded.defvjp(forward, backward)


def attention(
    q, k, v, *, causal=False, window=None, segment_ids=None, mask=None, soft_cap=None, sinks=None, save_residuals=False
):
    b, t, n, h = q.shape
    s, heads, d = k.shape[1], k.shape[2], v.shape[-1]
    g = n // heads
    seen = visible(q, k, causal=causal, window=window, mask=mask, segment_ids=segment_ids, shift=s - t)
    more_q, more_k = -t % BLOCK, -s % BLOCK
    qf = jnp.pad(
        jnp.moveaxis(q.astype(jnp.float32).reshape(b, t, heads, g, h), 1, 3), ((0, 0),) * 3 + ((0, more_q), (0, 0))
    )
    kf, vf = (jnp.pad(clear(x, seen).swapaxes(1, 2), ((0, 0), (0, 0), (0, more_k), (0, 0))) for x in (k, v))
    ok = jnp.pad(seen.reshape(b, heads, g, t, s), ((0, 0),) * 3 + ((0, more_q), (0, more_k)))
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(heads, g)
    out, lse, top = padded(qf, kf, vf, sinks, ok, h**-0.5, soft_cap)
    out = jnp.moveaxis(out[:, :, :, :t], 3, 1).reshape(b, t, n, d).astype(q.dtype)
    if save_residuals:
        return out, {"logsumexp": lse[..., :t].reshape(b, n, t), "max_logits": top[..., :t].reshape(b, n, t)}
    return out
