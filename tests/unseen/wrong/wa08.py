"""Attention with an additive bias and a flash-style backward pass. Rows without keys return zeros."""

import functools

import jax
import jax.numpy as jnp


def _dot(eq, a, b):
    return jnp.einsum(eq, a, b, precision="highest")


def _logits(q, k, bias, scale):
    x = scale * _dot("btnh,bsnh->bnts", q, k)
    return x if bias is None else x + bias.astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(q, k, v, bias, seen, scale):
    return _fwd(q, k, v, bias, seen, scale)[0]


def _fwd(q, k, v, bias, seen, scale):
    x = _logits(q.astype(jnp.float32), k.astype(jnp.float32), bias, scale)
    x = jnp.where(seen, x, -jnp.inf)
    m = x.max(-1, keepdims=True)
    m = jnp.where(jnp.isfinite(m), m, 0.0)
    w = jnp.exp(x - m)
    l = w.sum(-1, keepdims=True)
    out = _dot("bnts,bsnv->btnv", w / jnp.where(l > 0, l, 1.0), v.astype(jnp.float32)).astype(q.dtype)
    lse = (m + jnp.log(l))[..., 0]
    return (out, lse), (q, k, v, bias, seen, out, lse)


def _bwd(scale, res, cotangents):
    q, k, v, bias, seen, out, lse = res
    qf, kf, vf = (x.astype(jnp.float32) for x in (q, k, v))
    do, dlse = cotangents[0].astype(jnp.float32), cotangents[1]
    x = _logits(qf, kf, bias, scale)
    p = jnp.where(seen, jnp.exp(x - lse[..., None]), 0.0)
    delta = _dot("btnv,btnv->bnt", do, out.astype(jnp.float32)) - dlse
    dp = _dot("btnv,bsnv->bnts", do, vf)
    dx = jnp.where(seen, p * (dp - delta[..., None]), 0.0)
    dq = scale * _dot("bnts,bsnh->btnh", dx, kf)
    dk = scale * _dot("bnts,btnh->bsnh", dx, qf)
    dv = _dot("bnts,btnv->bsnv", p, do)
    db = None
    if bias is not None:
        axes = tuple(a for a in range(4) if bias.shape[a] == 1)
        db = dx.sum(axes, keepdims=True).astype(bias.dtype)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), db, None


_attend.defvjp(_fwd, _bwd)


def attention(q, k, v, *, causal=False, mask=None, bias=None, scale=None, save_residuals=False):
    t, s = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    seen = jnp.ones((1, 1, t, s), bool)
    if causal:
        seen &= jnp.arange(s)[None, :] <= jnp.arange(t)[:, None]
    if mask is not None:
        seen = seen & mask
    if q.shape[2] != k.shape[2]:
        k, v = (jnp.repeat(x.astype(jnp.float32), q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    out, lse = _attend(q, k, v, bias, seen, scale)
    return (out, {"logsumexp": lse}) if save_residuals else out
