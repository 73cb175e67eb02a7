"""Pallas attention in which numerator and denominator come from one product with [v, 1]."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


def _kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, *, scale, causal):
    q, k, v = q_ref[0, 0], k_ref[0, 0], v_ref[0, 0]
    x = scale * jnp.dot(q, k.T, precision="highest", preferred_element_type=jnp.float32)
    if causal:
        i = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
        j = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        x = jnp.where(j <= i, x, -jnp.inf)
    m = x.max(axis=1, keepdims=True)
    w = jnp.exp(x - m).astype(v.dtype)
    acc = jnp.dot(w, v, precision="highest", preferred_element_type=jnp.float32)
    l = acc[:, -1:]
    o_ref[0, 0] = (acc[:, :-1] / l).astype(o_ref.dtype)
    lse_ref[0, 0] = (m + jnp.log(l))[:, 0]


def _call(q, k, v, scale, causal):
    b, n, t, h = q.shape
    kv, s, d = k.shape[1], k.shape[2], v.shape[3]
    g = n // kv
    v = jnp.concatenate([v, jnp.ones((b, kv, s, 1), v.dtype)], axis=3)
    return pl.pallas_call(
        functools.partial(_kernel, scale=scale, causal=causal),
        grid=(b, n),
        in_specs=[
            pl.BlockSpec((1, 1, t, h), lambda b, n: (b, n, 0, 0)),
            pl.BlockSpec((1, 1, s, h), lambda b, n: (b, n // g, 0, 0)),
            pl.BlockSpec((1, 1, s, d + 1), lambda b, n: (b, n // g, 0, 0)),
        ],
        out_specs=[
            pl.BlockSpec((1, 1, t, d), lambda b, n: (b, n, 0, 0)),
            pl.BlockSpec((1, 1, t), lambda b, n: (b, n, 0)),
        ],
        out_shape=[jax.ShapeDtypeStruct((b, n, t, d), q.dtype), jax.ShapeDtypeStruct((b, n, t), jnp.float32)],
        interpret=True,
    )(q, k, v)


def _plain(q, k, v, scale, causal):
    g = q.shape[1] // k.shape[1]
    qf, kf, vf = q.astype(jnp.float32), *(jnp.repeat(x.astype(jnp.float32), g, axis=1) for x in (k, v))
    x = scale * jnp.einsum("bnth,bnsh->bnts", qf, kf, precision="highest")
    if causal:
        x = jnp.where(jnp.tril(jnp.ones(x.shape[-2:], bool)), x, -jnp.inf)
    m = jax.lax.stop_gradient(x.max(-1, keepdims=True))
    w = jnp.where(x > -jnp.inf, jnp.exp(x - m), 0.0)
    l = w.sum(-1, keepdims=True)
    return jnp.einsum("bnts,bnsv->bntv", w, vf, precision="highest") / l, (m + jnp.log(l))[..., 0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attend(q, k, v, scale, causal):
    return tuple(_call(q, k, v, scale, causal))


def _fwd(q, k, v, scale, causal):
    return tuple(_call(q, k, v, scale, causal)), (q, k, v)


def _bwd(scale, causal, res, cotangents):
    _, pull = jax.vjp(lambda *x: _plain(*x, scale, causal), *res)
    return pull((cotangents[0].astype(jnp.float32), cotangents[1]))


_attend.defvjp(_fwd, _bwd)


def attention(q, k, v, *, causal=False, scale=None, save_residuals=False):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = _attend(*(jnp.swapaxes(x, 1, 2) for x in (q, k, v)), scale, bool(causal))
    out = jnp.swapaxes(out, 1, 2)
    return (out, {"logsumexp": lse}) if save_residuals else out
