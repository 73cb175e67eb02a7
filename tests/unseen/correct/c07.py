"""Recomputing backward pass. The residuals are the maximum and the sum of each row."""

from functools import partial

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


def logits(q, k, bias, ok, scale, soft_cap):
    x = jnp.einsum("bkgth,bksh->bkgts", q, k, precision=HIGHEST) * scale
    if bias is not None:
        x = x + bias
    x = jnp.where(ok, x, 0)
    slope = 1.0
    if soft_cap is not None:
        y = jnp.tanh(x / soft_cap)
        x, slope = soft_cap * y, (1 - y) * (1 + y)
    return jnp.where(ok, x, -jnp.inf), slope


def blocks_of(x, axis, size):
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, -x.shape[axis] % size)
    x = jnp.pad(x, pad)
    x = x.reshape(x.shape[:axis] + (-1, size) + x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


@partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def core(q, k, v, bias, sinks, ok, scale, soft_cap):
    return forward(q, k, v, bias, sinks, ok, scale, soft_cap)[0]


def forward(q, k, v, bias, sinks, ok, scale, soft_cap):
    z, _ = logits(q, k, bias, ok, scale, soft_cap)
    top = jax.lax.stop_gradient(z.max(-1))
    m = top
    if sinks is not None:
        m = jnp.maximum(m, jax.lax.stop_gradient(sinks)[None, :, :, None])
    m = jnp.where(m == -jnp.inf, 0, m)
    e = jnp.where(ok, jnp.exp(z - m[..., None]), 0)
    l = e.sum(-1)
    if sinks is not None:
        l = l + jnp.exp(sinks[None, :, :, None] - m)
    empty = l == 0
    safe = jnp.where(empty, 1, l)
    out = jnp.einsum("bkgts,bksv->bkgtv", e, v, precision=HIGHEST) / safe[..., None]
    lse = jnp.where(empty, -jnp.inf, m + jnp.log(safe))
    return (out, lse, top), (q, k, v, bias, sinks, ok, out, m, safe)


def backward(scale, soft_cap, saved, cotangents):
    q, k, v, bias, sinks, ok, out, m, l = saved
    do, dlse, _ = cotangents
    delta = (do * out).sum(-1) - dlse
    s, t, size = k.shape[2], q.shape[3], 40

    def tile(q, k, v, bias, ok, do, delta, m, l):
        z, slope = logits(q, k, bias, ok, scale, soft_cap)
        p = jnp.exp(z - m[..., None]) / l[..., None]
        dp = jnp.einsum("bkgtv,bksv->bkgts", do, v, precision=HIGHEST)
        dx = jnp.where(ok, p * (dp - delta[..., None]) * slope, 0)
        return p, dx

    def by_keys(dq, operands):
        kj, vj, okj, biasj = operands
        _, dx = tile(q, kj, vj, biasj, okj, do, delta, m, l)
        return dq + jnp.einsum("bkgts,bksh->bkgth", dx, kj, precision=HIGHEST), None if bias is None else dx

    cut = (
        blocks_of(k, 2, size),
        blocks_of(v, 2, size),
        blocks_of(ok, 4, size),
        None if bias is None else blocks_of(bias, 4, size),
    )
    dq, dbias = jax.lax.scan(by_keys, jnp.zeros_like(q), cut)
    if bias is not None:
        dbias = jnp.moveaxis(dbias, 0, 4).reshape(bias.shape[:4] + (-1,))[..., :s]

    def by_queries(carry, operands):
        qi, oki, biasi, doi, deltai, mi, li = operands
        p, dx = tile(qi, k, v, biasi, oki, doi, deltai, mi, li)
        dk = carry[0] + jnp.einsum("bkgts,bkgth->bksh", dx, qi, precision=HIGHEST)
        dv = carry[1] + jnp.einsum("bkgts,bkgtv->bksv", p, doi, precision=HIGHEST)
        return (dk, dv), None

    ones = blocks_of(l - 1, 3, size) + 1
    rows = (
        blocks_of(q, 3, size),
        blocks_of(ok, 3, size),
        None if bias is None else blocks_of(bias, 3, size),
        blocks_of(do, 3, size),
        blocks_of(delta, 3, size),
        blocks_of(m, 3, size),
        ones,
    )
    (dk, dv), _ = jax.lax.scan(by_queries, (jnp.zeros_like(k), jnp.zeros_like(v)), rows)
    dsinks = None
    if sinks is not None:
        dsinks = -(jnp.exp(sinks[None, :, :, None] - m) / l * delta).sum((0, 3))
    return dq * scale, dk * scale, dv, dbias, dsinks, None


core.defvjp(forward, backward)


def attention(
    q,
    k,
    v,
    *,
    causal=False,
    window=None,
    mask=None,
    segment_ids=None,
    soft_cap=None,
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
    qf = jnp.moveaxis(q.astype(jnp.float32).reshape(b, t, heads, g, h), 1, 3)
    kf, vf = clear(k, seen).swapaxes(1, 2), clear(v, seen).swapaxes(1, 2)
    if bias is not None:
        bias = jnp.broadcast_to(bias.astype(jnp.float32), (b, n, t, s)).reshape(b, heads, g, t, s)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(heads, g)
    out, lse, top = core(qf, kf, vf, bias, sinks, seen.reshape(b, heads, g, t, s), scale, soft_cap)
    out = jnp.moveaxis(out, 3, 1).reshape(b, t, n, d).astype(q.dtype)
    if save_residuals:
        return out, {"logsumexp": lse.reshape(b, n, t), "max_logits": top.reshape(b, n, t)}
    return out
