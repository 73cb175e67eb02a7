"""Attention with per-head key gradients that are reduced over the heads of a group."""

import functools

import jax
import jax.numpy as jnp


def _dot(eq, a, b):
    return jnp.einsum(eq, a, b, precision="highest", preferred_element_type=jnp.float32)


def _probs(q, k, scale, causal, lse=None):
    x = scale * _dot("btnh,bsnh->bnts", q, k)
    if causal:
        x = jnp.where(jnp.tril(jnp.ones(x.shape[-2:], bool)), x, -jnp.inf)
    lse = jax.nn.logsumexp(x, axis=-1) if lse is None else lse
    return jnp.exp(x - lse[..., None]), lse


def _expand(x, n):
    return jnp.repeat(x, n // x.shape[2], axis=2).astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attend(q, k, v, scale, causal):
    return _fwd(q, k, v, scale, causal)[0]


def _fwd(q, k, v, scale, causal):
    n = q.shape[2]
    p, lse = _probs(q.astype(jnp.float32), _expand(k, n), scale, causal)
    out = _dot("bnts,bsnv->btnv", p, _expand(v, n)).astype(q.dtype)
    return (out, lse), (q, k, v, out, lse)


def _reduce(grad, like):
    b, s, n, d = grad.shape
    kv = like.shape[2]
    if n == kv:
        return grad.astype(like.dtype)
    return grad.reshape(b, s, kv, n // kv, d).sum(3)


def _bwd(scale, causal, res, cotangents):
    q, k, v, out, lse = res
    qf, kx, vx = q.astype(jnp.float32), _expand(k, q.shape[2]), _expand(v, q.shape[2])
    do, dlse = cotangents[0].astype(jnp.float32), cotangents[1]
    p, _ = _probs(qf, kx, scale, causal, lse)
    dp = _dot("btnv,bsnv->bnts", do, vx)
    delta = _dot("btnv,btnv->bnt", do, out.astype(jnp.float32)) - dlse
    ds = jnp.where(p > 0, p * (dp - delta[..., None]), 0.0)
    dq = (scale * _dot("bnts,bsnh->btnh", ds, kx)).astype(q.dtype)
    return dq, _reduce(scale * _dot("bnts,btnh->bsnh", ds, qf), k), _reduce(_dot("bnts,btnv->bsnv", p, do), v)


_attend.defvjp(_fwd, _bwd)


def attention(q, k, v, *, causal=False, scale=None, save_residuals=False):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = _attend(q, k, v, scale, bool(causal))
    return (out, {"logsumexp": lse}) if save_residuals else out
