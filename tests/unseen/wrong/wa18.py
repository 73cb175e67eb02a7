"""FlexAttention-style kernel: mask and score functions, backward over blocks of queries."""

import functools

import jax
import jax.numpy as jnp

BLOCK = 64


def _dot(eq, a, b):
    return jnp.einsum(eq, a, b, precision="highest")


def _places(b, n, rows, s):
    return (
        jnp.arange(b)[:, None, None, None],
        jnp.arange(n)[None, :, None, None],
        rows[None, None, :, None],
        jnp.arange(s)[None, None, None, :],
    )


def _logits(x, rows, mods):
    score_mod, mask_mod = mods
    b, n, _, s = x.shape
    at = _places(b, n, rows, s)
    if score_mod is not None:
        x = score_mod(x, *at)
    seen = jnp.bool_(True) if mask_mod is None else mask_mod(*at)
    return jnp.where(seen, x, -jnp.inf)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attend(q, k, v, scale, mods):
    return _fwd(q, k, v, scale, mods)[0]


def _fwd(q, k, v, scale, mods):
    qf, kf, vf = (x.astype(jnp.float32) for x in (q, k, v))
    x = _logits(scale * _dot("btnh,bsnh->bnts", qf, kf), jnp.arange(q.shape[1]), mods)
    m = x.max(-1)
    m = jnp.where(jnp.isfinite(m), m, 0.0)
    w = jnp.exp(x - m[..., None])
    l = w.sum(-1)
    total = jnp.where(l > 0, l, 1.0)
    out = _dot("bnts,bsnv->btnv", w / total[..., None], vf).astype(q.dtype)
    lse = jnp.where(l > 0, m + jnp.log(total), -jnp.inf)
    return (out, lse), (q, k, v, out, lse)


def _bwd(scale, mods, res, cotangents):
    q, k, v, out = (x.astype(jnp.float32) for x in res[:4])
    lse = jnp.where(jnp.isfinite(res[4]), res[4], jnp.inf)
    do, dlse = cotangents[0].astype(jnp.float32), cotangents[1]
    delta = _dot("btnv,btnv->bnt", do, out) - dlse
    b, t, n, _ = q.shape
    s = k.shape[1]
    dqs, dk, dv = [], jnp.zeros_like(k), jnp.zeros_like(v)
    for q0 in range(0, t, BLOCK):
        qb, dob = q[:, q0 : q0 + BLOCK], do[:, q0 : q0 + BLOCK]
        rows = jnp.arange(qb.shape[1])
        x = scale * _dot("btnh,bsnh->bnts", qb, k)
        p = jnp.exp(_logits(x, q0 + rows, mods) - lse[:, :, q0 : q0 + BLOCK, None])
        dp = _dot("btnv,bsnv->bnts", dob, v)
        ds = jnp.where(p > 0, p * (dp - delta[:, :, q0 : q0 + BLOCK, None]), 0.0)
        if mods[0] is not None:
            _, pull = jax.vjp(lambda y: mods[0](y, *_places(b, n, rows, s)), x)
            ds = jnp.where(p > 0, pull(ds)[0], 0.0)
        dqs.append(scale * _dot("bnts,bsnh->btnh", ds, k))
        dk = dk + scale * _dot("bnts,btnh->bsnh", ds, qb)
        dv = dv + _dot("bnts,btnv->bsnv", p, dob)
    return tuple(g.astype(x.dtype) for g, x in zip((jnp.concatenate(dqs, 1), dk, dv), res))


_attend.defvjp(_fwd, _bwd)


def attention(q, k, v, *, mask_mod=None, score_mod=None, scale=None, save_residuals=False):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if q.shape[2] != k.shape[2]:
        k, v = (jnp.repeat(x.astype(jnp.float32), q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    out, lse = _attend(q, k, v, scale, (score_mod, mask_mod))
    return (out, {"logsumexp": lse}) if save_residuals else out
