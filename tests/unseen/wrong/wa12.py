"""Biased attention, backward over blocks of queries so that only one block of probabilities is alive."""

import functools

import jax
import jax.numpy as jnp

BLOCK = 128


def _dot(eq, a, b):
    return jnp.einsum(eq, a, b, precision="highest")


def _rows(bias, q0, q1):
    return bias[:, :, q0:q1] if bias.shape[2] > 1 else bias


def _logits(q, k, bias, q0, q1, scale, causal):
    x = scale * _dot("btnh,bsnh->bnts", q[:, q0:q1], k) + _rows(bias, q0, q1).astype(jnp.float32)
    if causal:
        x = jnp.where(jnp.arange(k.shape[1])[None, :] <= jnp.arange(q0, q1)[:, None], x, -jnp.inf)
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(q, k, v, bias, scale, causal):
    return _fwd(q, k, v, bias, scale, causal)[0]


def _fwd(q, k, v, bias, scale, causal):
    qf, kf, vf = (x.astype(jnp.float32) for x in (q, k, v))
    x = _logits(qf, kf, bias, 0, q.shape[1], scale, causal)
    lse = jax.nn.logsumexp(x, axis=-1)
    p = jnp.exp(x - jnp.where(jnp.isfinite(lse), lse, jnp.inf)[..., None])
    out = _dot("bnts,bsnv->btnv", p, vf).astype(q.dtype)
    return (out, lse), (q, k, v, bias, out, lse)


def _bwd(scale, causal, res, cotangents):
    q, k, v, _, out = (x.astype(jnp.float32) for x in res[:5])
    bias, lse = res[3], jnp.where(jnp.isfinite(res[5]), res[5], jnp.inf)
    do, dlse = cotangents[0].astype(jnp.float32), cotangents[1]
    delta = _dot("btnv,btnv->bnt", do, out) - dlse
    axes = tuple(a for a in range(4) if bias.shape[a] == 1)
    dq, dk, dv = jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)
    dbias = jnp.zeros(bias.shape, jnp.float32)
    for q0 in range(0, q.shape[1], BLOCK):
        q1 = min(q.shape[1], q0 + BLOCK)
        p = jnp.exp(_logits(q, k, bias, q0, q1, scale, causal) - lse[:, :, q0:q1, None])
        dp = _dot("btnv,bsnv->bnts", do[:, q0:q1], v)
        dx = jnp.where(p > 0, p * (dp - delta[:, :, q0:q1, None]), 0.0)
        dq = dq.at[:, q0:q1].set(scale * _dot("bnts,bsnh->btnh", dx, k))
        dk = dk + scale * _dot("bnts,btnh->bsnh", dx, q[:, q0:q1])
        dv = dv + _dot("bnts,btnv->bsnv", p, do[:, q0:q1])
        rows = slice(q0, q1) if bias.shape[2] > 1 else slice(0, 1)
        dbias = dbias.at[:, :, rows].set(dx.sum(axes, keepdims=True))
    return tuple(g.astype(x.dtype) for g, x in zip((dq, dk, dv, dbias), res))


_attend.defvjp(_fwd, _bwd)


def attention(q, k, v, *, causal=False, bias=None, scale=None, save_residuals=False):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if q.shape[2] != k.shape[2]:
        k, v = (jnp.repeat(x.astype(jnp.float32), q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    if bias is None:
        bias = jnp.zeros((1, 1, 1, 1), jnp.float32)
    out, lse = _attend(q, k, v, bias, scale, bool(causal))
    return (out, {"logsumexp": lse}) if save_residuals else out
