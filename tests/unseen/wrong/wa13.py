"""Grouped-query attention; the backward pass visits one query head of each group at a time."""

import functools

import jax
import jax.numpy as jnp


def _dot(eq, a, b):
    return jnp.einsum(eq, a, b, precision="highest", preferred_element_type=jnp.float32)


def _seen(t, s, causal):
    return jnp.tril(jnp.ones((t, s), bool)) if causal else jnp.ones((t, s), bool)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attend(q, k, v, scale, causal):
    return _fwd(q, k, v, scale, causal)[0]


def _fwd(q, k, v, scale, causal):
    x = scale * _dot("gbtkh,bskh->gbkts", q, k)
    x = jnp.where(_seen(q.shape[2], k.shape[1], causal), x, -jnp.inf)
    lse = jax.nn.logsumexp(x, axis=-1)
    p = jnp.exp(x - lse[..., None])
    out = _dot("gbkts,bskv->gbtkv", p, v.astype(jnp.float32)).astype(q.dtype)
    return (out, lse), (q, k, v, out, lse)


def _bwd(scale, causal, res, cotangents):
    q, k, v, out, lse = res
    seen = _seen(q.shape[2], k.shape[1], causal)

    def head(carry, xs):
        dk, dv = carry
        qg, og, eg, dog, deg = xs
        x = scale * _dot("btkh,bskh->bkts", qg, k)
        p = jnp.where(seen, jnp.exp(x - eg[..., None]), 0.0)
        dog = dog.astype(jnp.float32)
        dp = _dot("btkv,bskv->bkts", dog, v.astype(jnp.float32))
        delta = _dot("btkv,btkv->bkt", dog, og.astype(jnp.float32)) - deg
        ds = jnp.where(p > 0, p * (dp - delta[..., None]), 0.0)
        dq = scale * _dot("bkts,bskh->btkh", ds, k.astype(jnp.float32))
        dk = dk + (scale * _dot("bkts,btkh->bskh", ds, qg.astype(jnp.float32))).astype(k.dtype)
        dv = dv + _dot("bkts,btkv->bskv", p, dog).astype(v.dtype)
        return (dk, dv), dq.astype(q.dtype)

    init = jnp.zeros_like(k), jnp.zeros_like(v)
    (dk, dv), dq = jax.lax.scan(head, init, (q, out, lse, *cotangents))
    return dq, dk, dv


_attend.defvjp(_fwd, _bwd)


def attention(q, k, v, *, causal=False, scale=None, save_residuals=False):
    b, t, n, h = q.shape
    kv = k.shape[2]
    scale = h**-0.5 if scale is None else scale
    q = jnp.moveaxis(q.reshape(b, t, kv, n // kv, h), 3, 0)
    out, lse = _attend(q, k, v, scale, bool(causal))
    out = jnp.moveaxis(out, 0, 3).reshape(b, t, n, v.shape[-1])
    lse = jnp.moveaxis(lse, 0, 2).reshape(b, n, t)
    return (out, {"logsumexp": lse}) if save_residuals else out
