import functools

import jax
import jax.numpy as jnp
import numpy as np

HI = jax.lax.Precision.HIGHEST
F32 = jnp.float32


def _visible(t, s, causal, window, mask, segment_ids, kv_lengths):
    i = jnp.arange(t, dtype=jnp.int32)[:, None]
    j = jnp.arange(s, dtype=jnp.int32)[None, :]
    see = jnp.ones((1, 1, t, s), bool)
    if causal:
        see &= j <= i
    if window is not None:
        left, right = window
        if left is not None:
            see &= j >= i - left
        if right is not None:
            see &= j - right <= i
    if kv_lengths is not None:
        see &= (j < kv_lengths[:, None, None])[:, None]
    if segment_ids is not None:
        ids_q, ids_k = segment_ids
        see &= (ids_q[:, :, None] == ids_k[:, None, :])[:, None]
    if mask is not None:
        see &= mask
    return see


def _by_group(x, kv_heads):
    if x.shape[1] == 1:
        return x[:, :, None]
    return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:])


def _clear_dead(see, k, v):
    b, s, heads, _ = k.shape
    live = _by_group(see, heads).any(axis=(2, 3))
    live = jnp.broadcast_to(live, (b, heads, s)).swapaxes(1, 2)[..., None]
    return jnp.where(live, k, 0), jnp.where(live, v, 0)


def _scores(cfg, q, k, bias):
    scale, cap = cfg
    b, t, n, h = q.shape
    heads = k.shape[2]
    qg = q.astype(F32).reshape(b, t, heads, n // heads, h)
    x = jnp.einsum("btkgh,bskh->bkgts", qg, k.astype(F32), precision=HI) * scale
    if bias is not None:
        x = x + _by_group(bias.astype(F32), heads)
    return x if cap is None else cap * jnp.tanh(x / cap)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(cfg, q, k, v, bias, sinks, see):
    return _attend_fwd(cfg, q, k, v, bias, sinks, see)[0]


def _attend_fwd(cfg, q, k, v, bias, sinks, see):
    b, t, n, _ = q.shape
    heads = k.shape[2]
    z = jnp.where(_by_group(see, heads), _scores(cfg, q, k, bias), -jnp.inf)
    m = z.max(axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(F32).reshape(1, heads, -1, 1, 1)
        m = jnp.maximum(m, sink)
    m = jnp.where(jnp.isfinite(m), m, 0)
    w = jnp.exp(z - m)
    total = w.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - m)
    safe = jnp.where(total == 0, 1, total)
    out = jnp.einsum("bkgts,bskv->btkgv", w / safe, v.astype(F32), precision=HI)
    out = out.reshape(b, t, n, -1).astype(q.dtype)
    lse = jnp.where(total == 0, -jnp.inf, m + jnp.log(safe))[..., 0].reshape(b, n, t)
    return (out, lse), (q, k, v, bias, sinks, see, out, lse)


def _reduce_like(x, shape):
    axes = tuple(a for a in range(x.ndim) if shape[a] == 1 and x.shape[a] != 1)
    return x.sum(axis=axes, keepdims=True)


def _attend_bwd(cfg, saved, cotangents):
    zeros = jax.tree.map(jnp.zeros_like, saved[:5])
    idle = jnp.logical_not(jnp.any(cotangents[0] != 0))
    grads = jax.lax.cond(idle, lambda *_: zeros, functools.partial(_gradients, cfg), saved, cotangents)
    return (*grads, None)


def _gradients(cfg, saved, cotangents):
    scale, cap = cfg
    q, k, v, bias, sinks, see, out, lse = saved
    do, dlse = cotangents
    b, t, n, h = q.shape
    s, heads = k.shape[1:3]
    g = n // heads
    split = lambda x: x.astype(F32).reshape(b, t, heads, g, -1)
    qg, og, dog = split(q), split(out), split(do)
    row = jnp.where(jnp.isfinite(lse), lse, 0).reshape(b, heads, g, t, 1)
    dlse = dlse.reshape(b, heads, g, t, 1)
    z = _scores(cfg, q, k, bias)
    seen = _by_group(see, heads)
    p = jnp.exp(jnp.where(seen, z, -jnp.inf) - row)
    dp = jnp.einsum("btkgv,bskv->bkgts", dog, v.astype(F32), precision=HI)
    delta = (og * dog).sum(axis=-1).transpose(0, 2, 3, 1)[..., None]
    dz = p * (dp - delta + dlse)
    slope = 1 if cap is None else 1 - (z / cap) ** 2
    dx = jnp.where(seen, dz * slope, 0)
    dq = scale * jnp.einsum("bkgts,bskh->btkgh", dx, k.astype(F32), precision=HI).reshape(q.shape)
    dk = scale * jnp.einsum("bkgts,btkgh->bskh", dx, qg, precision=HI)
    dv = jnp.einsum("bkgts,btkgv->bskv", p, dog, precision=HI)
    dbias = dsinks = None
    if bias is not None:
        dbias = _reduce_like(dx.reshape(b, n, t, s), bias.shape).astype(bias.dtype)
    if sinks is not None:
        weight = jnp.exp(sinks.astype(F32).reshape(1, heads, g, 1, 1) - row)
        dsinks = (weight * (dlse - delta)).sum(axis=(0, 3, 4)).reshape(n).astype(sinks.dtype)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dbias, dsinks


_attend.defvjp(_attend_fwd, _attend_bwd)


def attention(
    q,
    k,
    v,
    *,
    causal=False,
    window=None,
    kv_lengths=None,
    mask=None,
    segment_ids=None,
    soft_cap=None,
    sinks=None,
    bias=None,
    scale=None,
    save_residuals=False,
):
    t, s = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    see = _visible(t, s, causal, window, mask, segment_ids, kv_lengths)
    k, v = _clear_dead(see, k, v)
    out, lse = _attend((scale, soft_cap), q, k, v, bias, sinks, see)
    return (out, {"logsumexp": lse}) if save_residuals else out
