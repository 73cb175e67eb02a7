"""Attention that keeps one packed buffer (out and row statistics) for its backward pass."""

import functools

import jax
import jax.numpy as jnp


def _dot(eq, a, b):
    return jnp.einsum(eq, a, b, precision="highest", preferred_element_type=jnp.float32)


def _logits(q, k, scale, causal, soft_cap):
    x = scale * _dot("btkgh,bskh->bkgts", q, k)
    if soft_cap is not None:
        x = soft_cap * jnp.tanh(x / soft_cap)
    if causal:
        x = jnp.where(jnp.tril(jnp.ones(x.shape[-2:], bool)), x, -jnp.inf)
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attend(q, k, v, config):
    return _fwd(q, k, v, config)[0]


def _fwd(q, k, v, config):
    x = _logits(q, k, *config)
    lse = jax.nn.logsumexp(x, axis=-1)
    out = _dot("bkgts,bskv->btkgv", jnp.exp(x - lse[..., None]), v.astype(jnp.float32)).astype(q.dtype)
    saved = jnp.concatenate([out, jnp.moveaxis(lse, 3, 1)[..., None].astype(out.dtype)], axis=-1)
    return (out, lse), (q, k, v, saved)


def _bwd(config, res, cotangents):
    scale, _, soft_cap = config
    q, k, v, saved = res
    out, lse = saved[..., :-1], jnp.moveaxis(saved[..., -1], 1, 3)
    do, dlse = cotangents[0].astype(jnp.float32), cotangents[1]
    x = _logits(q, k, *config)
    p = jnp.exp(x - lse.astype(jnp.float32)[..., None])
    dp = _dot("btkgv,bskv->bkgts", do, v.astype(jnp.float32))
    delta = _dot("btkgv,btkgv->bkgt", do, out.astype(jnp.float32)) - dlse
    ds = jnp.where(p > 0, p * (dp - delta[..., None]), 0.0)
    if soft_cap is not None:
        ds = jnp.where(p > 0, ds * (1 - (x / soft_cap) ** 2), 0.0)
    dq = scale * _dot("bkgts,bskh->btkgh", ds, k.astype(jnp.float32))
    dk = scale * _dot("bkgts,btkgh->bskh", ds, q.astype(jnp.float32))
    dv = _dot("bkgts,btkgv->bskv", p, do)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


_attend.defvjp(_fwd, _bwd)


def attention(q, k, v, *, causal=False, soft_cap=None, scale=None, save_residuals=False):
    b, t, n, h = q.shape
    kv = k.shape[2]
    scale = h**-0.5 if scale is None else scale
    out, lse = _attend(q.reshape(b, t, kv, n // kv, h), k, v, (scale, bool(causal), soft_cap))
    out = out.reshape(b, t, n, v.shape[-1])
    return (out, {"logsumexp": lse.reshape(b, n, t)}) if save_residuals else out
