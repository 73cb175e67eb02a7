"""Segmented attention with a hand-written backward pass that recomputes probabilities."""

import functools

import jax
import jax.numpy as jnp


def _dot(eq, a, b):
    return jnp.einsum(eq, a, b, precision="highest")


def _logits(q, k, q_ids, k_ids, scale, causal):
    x = scale * _dot("btkgh,bskh->bkgts", q, k)
    seen = (q_ids[:, :, None] == k_ids[:, None, :])[:, None, None]
    if causal:
        seen &= jnp.tril(jnp.ones(x.shape[-2:], bool))
    return jnp.where(seen, x, -jnp.inf)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attend(q, k, v, q_ids, k_ids, scale, causal):
    return _fwd(q, k, v, q_ids, k_ids, scale, causal)[0]


def _fwd(q, k, v, q_ids, k_ids, scale, causal):
    x = _logits(q.astype(jnp.float32), k.astype(jnp.float32), q_ids, k_ids, scale, causal)
    m = x.max(-1)
    m = jnp.where(jnp.isfinite(m), m, 0.0)
    w = jnp.exp(x - m[..., None])
    l = w.sum(-1)
    total = jnp.where(l > 0, l, 1.0)
    out = _dot("bkgts,bskv->btkgv", w / total[..., None], v.astype(jnp.float32)).astype(q.dtype)
    lse = jnp.where(l > 0, m + jnp.log(total), -jnp.inf)
    ids = q_ids.astype(jnp.int16), k_ids.astype(jnp.int16)
    return (out, lse), (q, k, v, out, lse, ids)


def _bwd(scale, causal, res, cotangents):
    q, k, v, out = (x.astype(jnp.float32) for x in res[:4])
    lse, (q_ids, k_ids) = res[4:]
    do, dlse = cotangents[0].astype(jnp.float32), cotangents[1]
    alive = jnp.isfinite(lse)
    p = jnp.exp(_logits(q, k, q_ids, k_ids, scale, causal) - jnp.where(alive, lse, jnp.inf)[..., None])
    dp = _dot("btkgv,bskv->bkgts", do, v)
    delta = _dot("btkgv,btkgv->bkgt", do, out) - dlse
    ds = jnp.where(p > 0, p * (dp - delta[..., None]), 0.0)
    dq = scale * _dot("bkgts,bskh->btkgh", ds, k)
    dk = scale * _dot("bkgts,btkgh->bskh", ds, q)
    dv = _dot("bkgts,btkgv->bskv", p, do)
    return dq.astype(res[0].dtype), dk.astype(res[1].dtype), dv.astype(res[2].dtype), None, None


_attend.defvjp(_fwd, _bwd)


def attention(q, k, v, *, causal=False, segment_ids=None, scale=None, save_residuals=False):
    b, t, n, h = q.shape
    s, kv = k.shape[1], k.shape[2]
    scale = h**-0.5 if scale is None else scale
    if segment_ids is None:
        segment_ids = jnp.zeros((b, t), jnp.int32), jnp.zeros((b, s), jnp.int32)
    q_ids, k_ids = (jnp.asarray(x) for x in segment_ids)
    out, lse = _attend(q.reshape(b, t, kv, n // kv, h), k, v, q_ids, k_ids, scale, bool(causal))
    out = out.reshape(b, t, n, v.shape[-1])
    return (out, {"logsumexp": lse.reshape(b, n, t)}) if save_residuals else out
