"""Soft-capped attention whose logsumexp is differentiable (for a z-loss)."""

import functools

import jax
import jax.numpy as jnp


def _dot(eq, a, b):
    return jnp.einsum(eq, a, b, precision="highest")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attend(q, k, v, config):
    return _fwd(q, k, v, config)[0]


def _capped(q, k, scale, soft_cap):
    x = scale * _dot("btkgh,bskh->bkgts", q, k)
    return (x, None) if soft_cap is None else (soft_cap * jnp.tanh(x / soft_cap), jnp.tanh(x / soft_cap))


def _seen(t, s, causal):
    return jnp.tril(jnp.ones((t, s), bool)) if causal else jnp.ones((t, s), bool)


def _fwd(q, k, v, config):
    scale, soft_cap, causal = config
    z, _ = _capped(q.astype(jnp.float32), k.astype(jnp.float32), scale, soft_cap)
    z = jnp.where(_seen(q.shape[1], k.shape[1], causal), z, -jnp.inf)
    lse = jax.nn.logsumexp(z, axis=-1)
    out = _dot("bkgts,bskv->btkgv", jnp.exp(z - lse[..., None]), v.astype(jnp.float32)).astype(q.dtype)
    return (out, lse), (q, k, v, out, lse)


def _bwd(config, res, cotangents):
    scale, soft_cap, causal = config
    q, k, v, out = (x.astype(jnp.float32) for x in res[:4])
    lse = res[4]
    do, dlse = cotangents[0].astype(jnp.float32), cotangents[1]
    z, th = _capped(q, k, scale, soft_cap)
    p = jnp.where(_seen(q.shape[1], k.shape[1], causal), jnp.exp(z - lse[..., None]), 0.0)
    dv = _dot("bkgts,btkgv->bskv", p, do)
    dp = _dot("btkgv,bskv->bkgts", do, v)
    delta = _dot("btkgv,btkgv->bkgt", do, out)
    ds = jnp.where(p > 0, p * (dp - delta[..., None]), 0.0)
    if soft_cap is not None:
        ds = ds * (1.0 - th * th)
    ds = ds + p * dlse[..., None]
    dq = scale * _dot("bkgts,bskh->btkgh", ds, k)
    dk = scale * _dot("bkgts,btkgh->bskh", ds, q)
    return dq.astype(res[0].dtype), dk.astype(res[1].dtype), dv.astype(res[2].dtype)


_attend.defvjp(_fwd, _bwd)


def attention(q, k, v, *, causal=False, soft_cap=None, scale=None, save_residuals=False):
    b, t, n, h = q.shape
    kv = k.shape[2]
    scale = h**-0.5 if scale is None else scale
    out, lse = _attend(q.reshape(b, t, kv, n // kv, h), k, v, (scale, soft_cap, bool(causal)))
    out = out.reshape(b, t, n, v.shape[-1])
    return (out, {"logsumexp": lse.reshape(b, n, t)}) if save_residuals else out
