"""Attention with options kept in one plan, so that forward and backward share them."""

import jax
import jax.numpy as jnp

_plan = {"causal": False, "window": None, "scale": 1.0, "soft_cap": None}


def _dot(eq, a, b):
    return jnp.einsum(eq, a, b, precision="highest")


def _logits(q, k):
    x = _plan["scale"] * _dot("btkgh,bskh->bkgts", q, k)
    cap = _plan["soft_cap"]
    if cap is not None:
        x = cap * jnp.tanh(x / cap)
    i, j = jnp.arange(x.shape[-2])[:, None], jnp.arange(x.shape[-1])[None, :]
    seen = jnp.ones(x.shape[-2:], bool)
    if _plan["causal"]:
        seen &= j <= i
    left, right = _plan["window"] or (None, None)
    if left is not None:
        seen &= j >= i - left
    if right is not None:
        seen &= j <= i + right
    return jnp.where(seen, x, -jnp.inf)


@jax.custom_vjp
def _attend(q, k, v):
    return _fwd(q, k, v)[0]


def _fwd(q, k, v):
    x = _logits(q.astype(jnp.float32), k.astype(jnp.float32))
    m = x.max(-1)
    m = jnp.where(jnp.isfinite(m), m, 0.0)
    w = jnp.exp(x - m[..., None])
    l = w.sum(-1)
    total = jnp.where(l > 0, l, 1.0)
    out = _dot("bkgts,bskv->btkgv", w / total[..., None], v.astype(jnp.float32)).astype(q.dtype)
    lse = jnp.where(l > 0, m + jnp.log(total), -jnp.inf)
    return (out, lse), (q, k, v, out, lse)


def _bwd(res, cotangents):
    q, k, v, out = (x.astype(jnp.float32) for x in res[:4])
    lse = jnp.where(jnp.isfinite(res[4]), res[4], jnp.inf)
    do, dlse = cotangents[0].astype(jnp.float32), cotangents[1]
    x = _logits(q, k)
    p = jnp.exp(x - lse[..., None])
    dp = _dot("btkgv,bskv->bkgts", do, v)
    delta = _dot("btkgv,btkgv->bkgt", do, out) - dlse
    ds = jnp.where(p > 0, p * (dp - delta[..., None]), 0.0)
    if _plan["soft_cap"] is not None:
        ds = jnp.where(p > 0, ds * (1 - (x / _plan["soft_cap"]) ** 2), 0.0)
    dq = _plan["scale"] * _dot("bkgts,bskh->btkgh", ds, k)
    dk = _plan["scale"] * _dot("bkgts,btkgh->bskh", ds, q)
    dv = _dot("bkgts,btkgv->bskv", p, do)
    return tuple(g.astype(x.dtype) for g, x in zip((dq, dk, dv), res))


_attend.defvjp(_fwd, _bwd)


def attention(q, k, v, *, causal=False, window=None, soft_cap=None, scale=None, save_residuals=False):
    b, t, n, h = q.shape
    kv = k.shape[2]
    _plan.update(causal=causal, window=window, soft_cap=soft_cap, scale=h**-0.5 if scale is None else scale)
    out, lse = _attend(q.reshape(b, t, kv, n // kv, h), k, v)
    out = out.reshape(b, t, n, v.shape[-1])
    return (out, {"logsumexp": lse.reshape(b, n, t)}) if save_residuals else out
