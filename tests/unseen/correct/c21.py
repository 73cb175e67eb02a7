"""Pallas kernels for the forward pass, for dq, and for dk and dv of each query head."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

HIGHEST = jax.lax.Precision.HIGHEST
BLOCK = 32


def visible(q, k, causal=False, mask=None, segment_ids=None, shift=0):
    b, t, n, s = q.shape[0], q.shape[1], q.shape[2], k.shape[1]
    at = jnp.arange(t, dtype=jnp.int32)[:, None] + shift
    j = jnp.arange(s, dtype=jnp.int32)[None, :]
    seen = jnp.ones((1, 1, t, s), bool)
    if causal:
        seen &= j <= at
    if segment_ids is not None:
        ids_q, ids_k = segment_ids
        seen = seen & (ids_q[:, None, :, None] == ids_k[:, None, None, :])
    if mask is not None:
        seen = seen & mask
    return jnp.broadcast_to(seen, (b, n, t, s))


def clear(x, seen):
    """Zero rows of keys or values that no query of their group sees, in float32."""
    b, n, t, s = seen.shape
    live = seen.reshape(b, x.shape[2], -1, s).any(2)
    return jnp.where(live.swapaxes(1, 2)[..., None], x, 0).astype(jnp.float32)


def dot(a, b):
    return jnp.dot(a, b, precision=HIGHEST, preferred_element_type=jnp.float32)


def forward_kernel(q_ref, k_ref, v_ref, ok_ref, sink_ref, o_ref, m_ref, l_ref, *, scale):
    ok = ok_ref[...] != 0
    x = jnp.where(ok, dot(q_ref[...], k_ref[...].T) * scale, -jnp.inf)
    top = x.max(axis=1, keepdims=True)
    pivot = jnp.maximum(top, sink_ref[0, 0])
    safe = jnp.where(pivot == -jnp.inf, 0.0, pivot)
    e = jnp.exp(x - safe)
    l = e.sum(axis=1, keepdims=True) + jnp.exp(sink_ref[0, 0] - safe)
    m_ref[...] = top
    l_ref[...] = jnp.where(l == 0, -jnp.inf, safe + jnp.log(jnp.where(l == 0, 1.0, l)))
    o_ref[...] = dot(e, v_ref[...]) / jnp.where(l == 0, 1.0, l)


def tile(q, k, v, ok, lse, delta, do, scale):
    x = jnp.where(ok, dot(q, k.T) * scale, -jnp.inf)
    p = jnp.exp(x - jnp.where(lse == -jnp.inf, 0.0, lse))
    dx = jnp.where(ok, p * (dot(do, v.T) - delta), 0.0)
    return p, dx


def dq_kernel(q_ref, k_ref, v_ref, ok_ref, lse_ref, delta_ref, do_ref, dq_ref, *, scale):
    _, dx = tile(q_ref[...], k_ref[...], v_ref[...], ok_ref[...] != 0, lse_ref[...], delta_ref[...], do_ref[...], scale)
    dq_ref[...] = dot(dx, k_ref[...]) * scale


def dkv_kernel(q_ref, k_ref, v_ref, ok_ref, lse_ref, delta_ref, do_ref, dk_ref, dv_ref, *, scale):
    p, dx = tile(q_ref[...], k_ref[...], v_ref[...], ok_ref[...] != 0, lse_ref[...], delta_ref[...], do_ref[...], scale)
    dk_ref[...] = dot(dx.T, q_ref[...]) * scale
    dv_ref[...] = dot(p.T, do_ref[...])


def specs(g, t, s, by_rows):
    """Blocks of rows of [B, N, T, x], or of keys of [B, K, S, x]; the other operands whole."""
    if by_rows:
        rows = lambda width: pl.BlockSpec((None, None, BLOCK, width), lambda b, n, i: (b, n, i, 0))
        keys = lambda width: pl.BlockSpec((None, None, s, width), lambda b, n, i: (b, n // g, 0, 0))
        return rows, keys, rows(s)
    rows = lambda width: pl.BlockSpec((None, None, t, width), lambda b, n, j: (b, n, 0, 0))
    keys = lambda width: pl.BlockSpec((None, None, BLOCK, width), lambda b, n, j: (b, n // g, j, 0))
    return rows, keys, pl.BlockSpec((None, None, t, BLOCK), lambda b, n, j: (b, n, 0, j))


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def flash(q, k, v, sink, ok, scale):
    return forward(q, k, v, sink, ok, scale)[0]


def forward(q, k, v, sink, ok, scale):
    b, n, t, h = q.shape
    s, d = k.shape[2], v.shape[-1]
    rows, keys, pairs = specs(n // k.shape[1], t, s, True)
    shape = lambda x: jax.ShapeDtypeStruct((b, n, t, x), jnp.float32)
    call = pl.pallas_call(
        partial(forward_kernel, scale=scale),
        grid=(b, n, t // BLOCK),
        in_specs=[rows(h), keys(h), keys(d), pairs, pl.BlockSpec((1, 1), lambda b, n, i: (n, 0))],
        out_specs=[rows(d), rows(1), rows(1)],
        out_shape=[shape(d), shape(1), shape(1)],
        interpret=True,
    )
    out, top, lse = first_order(call)(q, k, v, ok, sink[:, None])
    return (out, lse, top), (q, k, v, sink, ok, out, lse)


def first_order(f):
    """Let f be called in a derivative rule, and refuse to differentiate it again."""
    g = jax.custom_jvp(f)

    @g.defjvp
    def _(primals, tangents):
        raise NotImplementedError("second derivatives of this kernel")

    return g


def gradients(scale, q, k, v, ok, lse, delta, do):
    b, n, t, h = q.shape
    heads, s, d = k.shape[1], k.shape[2], v.shape[-1]
    operands = (q, k, v, ok, lse, delta, do)
    rows, keys, pairs = specs(n // heads, t, s, True)
    inputs = lambda rows, keys, pairs: [rows(h), keys(h), keys(d), pairs, rows(1), rows(1), rows(d)]
    dq = pl.pallas_call(
        partial(dq_kernel, scale=scale),
        grid=(b, n, t // BLOCK),
        in_specs=inputs(rows, keys, pairs),
        out_specs=rows(h),
        out_shape=jax.ShapeDtypeStruct(q.shape, jnp.float32),
        interpret=True,
    )(*operands)
    rows, keys, pairs = specs(n // heads, t, s, False)
    out = lambda width: pl.BlockSpec((None, None, BLOCK, width), lambda b, n, j: (b, n, j, 0))
    dk, dv = pl.pallas_call(
        partial(dkv_kernel, scale=scale),
        grid=(b, n, s // BLOCK),
        in_specs=inputs(rows, keys, pairs),
        out_specs=[out(h), out(d)],
        out_shape=[jax.ShapeDtypeStruct((b, n, s, x), jnp.float32) for x in (h, d)],
        interpret=True,
    )(*operands)
    return dq, dk.reshape(b, heads, -1, s, h).sum(2), dv.reshape(b, heads, -1, s, d).sum(2)


def backward(scale, saved, cotangents):
    q, k, v, sink, ok, out, lse = saved
    do, dlse, _ = cotangents
    delta = (do * out).sum(-1, keepdims=True) - dlse
    dq, dk, dv = first_order(partial(gradients, scale))(q, k, v, ok, lse, delta, do)
    p_sink = jnp.exp(sink[None, :, None, None] - jnp.where(lse == -jnp.inf, 0, lse))
    return dq, dk, dv, -(p_sink * delta).sum((0, 2, 3)), None


flash.defvjp(forward, backward)


def attention(q, k, v, *, causal=False, mask=None, segment_ids=None, sinks=None, scale=None, save_residuals=False):
    b, t, n, h = q.shape
    s = k.shape[1]
    scale = h**-0.5 if scale is None else scale
    seen = visible(q, k, causal=causal, mask=mask, segment_ids=segment_ids, shift=s - t)
    more_q, more_k = -t % BLOCK, -s % BLOCK
    pad = lambda x, more: jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, more), (0, 0)))
    ok = jnp.pad(seen, ((0, 0), (0, 0), (0, more_q), (0, more_k))).astype(jnp.int8)
    sink = jnp.full((n,), -jnp.inf, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    out, lse, top = flash(
        pad(q.astype(jnp.float32), more_q), pad(clear(k, seen), more_k), pad(clear(v, seen), more_k), sink, ok, scale
    )
    out = out[:, :, :t].swapaxes(1, 2).astype(q.dtype)
    if save_residuals:
        return out, {"logsumexp": lse[:, :, :t, 0], "max_logits": top[:, :, :t, 0]}
    return out
