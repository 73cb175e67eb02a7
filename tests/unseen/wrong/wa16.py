"""Cosine-style attention: a learned factor of the logits for each head, with its gradient."""

import functools

import jax
import jax.numpy as jnp


def _dot(eq, a, b):
    return jnp.einsum(eq, a, b, precision="highest", preferred_element_type=jnp.float32)


def _logits(q, k, factor, scale):
    return factor[None, :, None, None] * (scale * _dot("btnh,bsnh->bnts", q, k))


def _mask(x, causal):
    return jnp.where(jnp.tril(jnp.ones(x.shape[-2:], bool)), x, -jnp.inf) if causal else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(q, k, v, factor, scale, causal):
    return _fwd(q, k, v, factor, scale, causal)[0]


def _fwd(q, k, v, factor, scale, causal):
    x = _mask(_logits(q, k, factor, scale), causal)
    lse = jax.nn.logsumexp(x, axis=-1)
    out = _dot("bnts,bsnv->btnv", jnp.exp(x - lse[..., None]), v.astype(jnp.float32)).astype(q.dtype)
    return (out, lse), (q, k, v, factor, out, lse)


def _bwd(scale, causal, res, cotangents):
    q, k, v, factor, out, lse = res
    do, dlse = cotangents[0].astype(jnp.float32), cotangents[1]
    x = _logits(q, k, factor, scale)
    p = jnp.exp(_mask(x, causal) - lse[..., None])
    dp = _dot("btnv,bsnv->bnts", do, v.astype(jnp.float32))
    delta = _dot("btnv,btnv->bnt", do, out.astype(jnp.float32)) - dlse
    dx = jnp.where(p > 0, p * (dp - delta[..., None]), 0.0)
    dfactor = jnp.where(p > 0, dx * x, 0.0).sum((0, 2, 3)) / factor
    dy = dx * (factor * scale)[None, :, None, None]
    dq = _dot("bnts,bsnh->btnh", dy, k.astype(jnp.float32))
    dk = _dot("bnts,btnh->bsnh", dy, q.astype(jnp.float32))
    dv = _dot("bnts,btnv->bsnv", p, do)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dfactor.astype(factor.dtype)


_attend.defvjp(_fwd, _bwd)


def attention(q, k, v, *, causal=False, logit_scale=None, scale=None, save_residuals=False):
    n = q.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if n != k.shape[2]:
        k, v = (jnp.repeat(x.astype(jnp.float32), n // x.shape[2], axis=2) for x in (k, v))
    factor = jnp.ones((n,), jnp.float32) if logit_scale is None else logit_scale
    out, lse = _attend(q, k, v, factor, scale, bool(causal))
    return (out, {"logsumexp": lse}) if save_residuals else out
