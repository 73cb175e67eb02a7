"""Sliding-window attention that visits only blocks inside the band, forward and backward."""

import functools

import jax
import jax.numpy as jnp

BLOCK = 128


def _dot(eq, a, b):
    return jnp.einsum(eq, a, b, precision="highest")


def _band(q0, q1, k0, k1, causal, left, right):
    i = jnp.arange(q0, q1)[:, None]
    j = jnp.arange(k0, k1)[None, :]
    seen = jnp.ones((q1 - q0, k1 - k0), bool)
    if causal:
        seen &= j <= i
    if left is not None:
        seen &= j >= i - left
    if right is not None:
        seen &= j <= i + right
    return seen


def _logits(q, k, seen, scale, soft_cap):
    x = scale * _dot("btnh,bsnh->bnts", q, k)
    z = x if soft_cap is None else soft_cap * jnp.tanh(x / soft_cap)
    return jnp.where(seen, z, -jnp.inf)


def _up(n):
    return -(-n // BLOCK) * BLOCK


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attend(q, k, v, config):
    return _fwd(q, k, v, config)[0]


def _fwd(q, k, v, config):
    scale, soft_cap, causal, left, right = config
    qf, kf, vf = (x.astype(jnp.float32) for x in (q, k, v))
    t, s = q.shape[1], k.shape[1]
    outs, lses = [], []
    for q0 in range(0, t, BLOCK):
        q1 = min(t, q0 + BLOCK)
        lo = 0 if left is None else min(s - 1, max(0, q0 - left) // BLOCK * BLOCK)
        ahead = 0 if causal else right
        hi = s if ahead is None else min(s, _up(q1 + ahead))
        seen = _band(q0, q1, lo, hi, causal, left, right)
        z = _logits(qf[:, q0:q1], kf[:, lo:hi], seen, scale, soft_cap)
        m = z.max(-1)
        m = jnp.where(jnp.isfinite(m), m, 0.0)
        w = jnp.exp(z - m[..., None])
        l = w.sum(-1)
        total = jnp.where(l > 0, l, 1.0)
        outs.append(_dot("bnts,bsnv->btnv", w / total[..., None], vf[:, lo:hi]))
        lses.append(jnp.where(l > 0, m + jnp.log(total), -jnp.inf))
    out, lse = jnp.concatenate(outs, 1).astype(q.dtype), jnp.concatenate(lses, 2)
    return (out, lse), (q, k, v, out, lse)


def _bwd(config, res, cotangents):
    scale, soft_cap, causal, left, right = config
    q, k, v, out = (x.astype(jnp.float32) for x in res[:4])
    lse = jnp.where(jnp.isfinite(res[4]), res[4], jnp.inf)
    do, dlse = cotangents[0].astype(jnp.float32), cotangents[1]
    delta = _dot("btnv,btnv->bnt", do, out) - dlse
    t, s = q.shape[1], k.shape[1]
    dq = jnp.zeros_like(q)
    dks, dvs = [], []
    for k0 in range(0, s, BLOCK):
        k1 = min(s, k0 + BLOCK)
        ahead = 0 if causal else right
        lo = 0 if ahead is None else min(t - 1, max(0, k0 - ahead) // BLOCK * BLOCK)
        hi = t if left is None else max(lo + 1, min(t, _up(k0 + left + 1)))
        z = _logits(q[:, lo:hi], k[:, k0:k1], _band(lo, hi, k0, k1, causal, left, right), scale, soft_cap)
        p = jnp.exp(z - lse[:, :, lo:hi, None])
        dp = _dot("btnv,bsnv->bnts", do[:, lo:hi], v[:, k0:k1])
        ds = jnp.where(p > 0, p * (dp - delta[:, :, lo:hi, None]), 0.0)
        if soft_cap is not None:
            ds = jnp.where(p > 0, ds * (1 - (z / soft_cap) ** 2), 0.0)
        dq = dq.at[:, lo:hi].add(scale * _dot("bnts,bsnh->btnh", ds, k[:, k0:k1]))
        dks.append(scale * _dot("bnts,btnh->bsnh", ds, q[:, lo:hi]))
        dvs.append(_dot("bnts,btnv->bsnv", p, do[:, lo:hi]))
    grads = dq, jnp.concatenate(dks, 1), jnp.concatenate(dvs, 1)
    return tuple(g.astype(x.dtype) for g, x in zip(grads, res))


_attend.defvjp(_fwd, _bwd)


def attention(q, k, v, *, causal=False, window=None, soft_cap=None, scale=None, save_residuals=False):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    left, right = (None, None) if window is None else window
    if q.shape[2] != k.shape[2]:
        k, v = (jnp.repeat(x.astype(jnp.float32), q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    out, lse = _attend(q, k, v, (scale, soft_cap, bool(causal), left, right))
    return (out, {"logsumexp": lse}) if save_residuals else out
