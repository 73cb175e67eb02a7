"""Causal flash attention with separate backward loops for dq and for dk, dv."""

import functools

import jax
import jax.numpy as jnp

BQ = 64
BK = 64


def _dot(eq, a, b):
    return jnp.einsum(eq, a, b, precision="highest")


def _logits(q, k, q0, k0, offset, scale, causal):
    x = scale * _dot("btnh,bsnh->bnts", q, k)
    if not causal:
        return x
    i = q0 + offset + jnp.arange(q.shape[1])[:, None]
    j = k0 + jnp.arange(k.shape[1])[None, :]
    return jnp.where(j <= i, x, -jnp.inf)


def _forward(q, k, v, scale, causal):
    t, s = q.shape[1], k.shape[1]
    offset = s - t
    outs, lses = [], []
    for q0 in range(0, t, BQ):
        qb = q[:, q0 : q0 + BQ]
        hi = min(s, max(1, q0 + BQ + offset)) if causal else s
        x = _logits(qb, k[:, :hi], q0, 0, offset, scale, causal)
        m = x.max(-1)
        safe = jnp.where(jnp.isfinite(m), m, 0.0)
        w = jnp.exp(x - safe[..., None])
        l = w.sum(-1)
        total = jnp.where(l > 0, l, 1.0)
        outs.append(_dot("bnts,bsnv->btnv", w / total[..., None], v[:, :hi]))
        lses.append(jnp.where(l > 0, safe + jnp.log(total), -jnp.inf))
    return jnp.concatenate(outs, 1), jnp.concatenate(lses, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _flash(q, k, v, scale, causal):
    out, lse = _forward(*(x.astype(jnp.float32) for x in (q, k, v)), scale, causal)
    return out.astype(q.dtype), lse


def _fwd(q, k, v, scale, causal):
    out, lse = _flash(q, k, v, scale, causal)
    return (out, lse), (q, k, v, out, lse)


def _bwd(scale, causal, res, cotangents):
    dtypes = [x.dtype for x in res[:3]]
    q, k, v, out = (x.astype(jnp.float32) for x in res[:4])
    lse = res[4]
    do, dlse = cotangents[0].astype(jnp.float32), cotangents[1]
    t, s = q.shape[1], k.shape[1]
    offset = s - t
    lse = jnp.where(jnp.isfinite(lse), lse, jnp.inf)
    delta = _dot("btnv,btnv->bnt", do, out) - dlse

    def dx(q0, q1, k0, k1):
        x = _logits(q[:, q0:q1], k[:, k0:k1], q0, k0, offset, scale, causal)
        p = jnp.exp(x - lse[:, :, q0:q1, None])
        dp = _dot("btnv,bsnv->bnts", do[:, q0:q1], v[:, k0:k1])
        return p, jnp.where(p > 0, p * (dp - delta[:, :, q0:q1, None]), 0.0)

    dq, dk, dv = [], [], []
    for q0 in range(0, t, BQ):
        q1 = min(t, q0 + BQ)
        hi = min(s, max(1, q1 + offset)) if causal else s
        _, ds = dx(q0, q1, 0, hi)
        dq.append(scale * _dot("bnts,bsnh->btnh", ds, k[:, :hi]))
    for k0 in range(0, s, BK):
        k1 = min(s, k0 + BK)
        lo = min(k0 // BQ * BQ, t - 1) if causal else 0
        p, ds = dx(lo, t, k0, k1)
        dk.append(scale * _dot("bnts,btnh->bsnh", ds, q[:, lo:]))
        dv.append(_dot("bnts,btnv->bsnv", p, do[:, lo:]))
    return tuple(jnp.concatenate(x, 1).astype(d) for x, d in zip((dq, dk, dv), dtypes))


_flash.defvjp(_fwd, _bwd)


def attention(q, k, v, *, causal=False, scale=None, save_residuals=False):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[2]
    if group > 1:
        k, v = (jnp.repeat(x.astype(jnp.float32), group, axis=2) for x in (k, v))
    out, lse = _flash(q, k, v, scale, bool(causal))
    return (out, {"logsumexp": lse}) if save_residuals else out
