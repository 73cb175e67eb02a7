"""Attention with learned sinks and segment ids. Rows without keys return zeros."""

import functools

import jax
import jax.numpy as jnp


def _dot(eq, a, b):
    return jnp.einsum(eq, a, b, precision="highest")


def _seen(t, s, ids, causal):
    seen = jnp.tril(jnp.ones((t, s), bool)) if causal else jnp.ones((t, s), bool)
    seen = seen[None]
    if ids is not None:
        seen = seen & (ids[0][:, :, None] == ids[1][:, None, :])
    return seen[:, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attend(q, k, v, sinks, ids, scale, causal):
    return _fwd(q, k, v, sinks, ids, scale, causal)[0]


def _fwd(q, k, v, sinks, ids, scale, causal):
    seen = _seen(q.shape[1], k.shape[1], ids, causal)
    x = scale * _dot("btnh,bsnh->bnts", q.astype(jnp.float32), k.astype(jnp.float32))
    x = jnp.where(seen, x, -jnp.inf)
    m = x.max(-1)
    if sinks is not None:
        m = jnp.maximum(m, sinks[None, :, None])
    m = jnp.where(jnp.isfinite(m), m, 0.0)
    w = jnp.exp(x - m[..., None])
    l = w.sum(-1)
    if sinks is not None:
        l = l + jnp.exp(sinks[None, :, None] - m)
    total = jnp.where(l > 0, l, 1.0)
    out = _dot("bnts,bsnv->btnv", w / total[..., None], v.astype(jnp.float32)).astype(q.dtype)
    lse = jnp.where(l > 0, m + jnp.log(total), -jnp.inf)
    return (out, lse), (q, k, v, sinks, ids, out, lse)


def _bwd(scale, causal, res, cotangents):
    q, k, v, sinks, ids, out, lse = res
    qf, kf, vf = (x.astype(jnp.float32) for x in (q, k, v))
    do, dlse = cotangents[0].astype(jnp.float32), cotangents[1]
    seen = _seen(q.shape[1], k.shape[1], ids, causal)
    alive = seen.any(-1)
    pivot = jnp.where(jnp.isfinite(lse), lse, jnp.inf)
    x = scale * _dot("btnh,bsnh->bnts", qf, kf)
    p = jnp.where(seen, jnp.exp(x - pivot[..., None]), 0.0)
    delta = jnp.where(alive, _dot("btnv,btnv->bnt", do, out.astype(jnp.float32)) - dlse, 0.0)
    dp = _dot("btnv,bsnv->bnts", do, vf)
    dx = jnp.where(seen, p * (dp - delta[..., None]), 0.0)
    dq = scale * _dot("bnts,bsnh->btnh", dx, kf)
    dk = scale * _dot("bnts,btnh->bsnh", dx, qf)
    dv = _dot("bnts,btnv->bsnv", p, do)
    ds = None
    if sinks is not None:
        ds = -(jnp.exp(sinks[None, :, None] - pivot) * delta).sum((0, 2)).astype(sinks.dtype)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), ds, None


_attend.defvjp(_fwd, _bwd)


def attention(q, k, v, *, causal=False, segment_ids=None, sinks=None, scale=None, save_residuals=False):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if q.shape[2] != k.shape[2]:
        k, v = (jnp.repeat(x.astype(jnp.float32), q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    ids = None if segment_ids is None else tuple(jnp.asarray(x) for x in segment_ids)
    out, lse = _attend(q, k, v, sinks, ids, scale, bool(causal))
    return (out, {"logsumexp": lse}) if save_residuals else out
