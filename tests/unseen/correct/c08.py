"""Backward pass from saved probabilities."""

from functools import partial

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


def visible(q, k, mask=None, segment_ids=None):
    b, t, n, s = q.shape[0], q.shape[1], q.shape[2], k.shape[1]
    at = jnp.arange(t, dtype=jnp.int32)[:, None]
    j = jnp.arange(s, dtype=jnp.int32)[None, :]
    seen = jnp.ones((1, 1, t, s), bool)
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


@partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def core(q, k, v, bias, sinks, ok, scale, soft_cap):
    return core_fwd(q, k, v, bias, sinks, ok, scale, soft_cap)[0]


def core_fwd(q, k, v, bias, sinks, ok, scale, soft_cap):
    x = scale * jnp.einsum("bkgth,bksh->bkgts", q, k, precision=HIGHEST)
    x = x if bias is None else x + bias
    slope = None
    if soft_cap is not None:
        y = jnp.tanh(jnp.where(ok, x, 0) / soft_cap)
        x, slope = soft_cap * y, 1 - y * y
    x = jnp.where(ok, x, -jnp.inf)
    top = jax.lax.stop_gradient(x.max(-1, keepdims=True))
    sink = None if sinks is None else sinks[None, :, :, None, None]
    m = top if sink is None else jnp.maximum(top, jax.lax.stop_gradient(sink))
    m = jnp.where(m == -jnp.inf, 0, m)
    e = jnp.exp(x - m)
    tail = 0 if sink is None else jnp.exp(sink - m)
    l = e.sum(-1, keepdims=True) + tail
    empty = l == 0
    l = jnp.where(empty, 1, l)
    p = jnp.where(ok, e / l, 0)
    p_sink = None if sink is None else tail / l
    out = jnp.einsum("bkgts,bksv->bkgtv", p, v, precision=HIGHEST)
    lse = jnp.where(empty, -jnp.inf, m + jnp.log(l))
    return (out, lse[..., 0], top[..., 0]), (q, k, v, p, p_sink, slope, bias)


def core_bwd(scale, soft_cap, saved, cotangents):
    q, k, v, p, p_sink, slope, bias = saved
    do, dlse, _ = cotangents
    dp = jnp.einsum("bkgtv,bksv->bkgts", do, v, precision=HIGHEST)
    dp = jnp.where(p > 0, dp, 0)
    row = (p * dp).sum(-1, keepdims=True) - dlse[..., None]
    dx = p * (dp - row)
    if slope is not None:
        dx = dx * slope
    dq = scale * jnp.einsum("bkgts,bksh->bkgth", dx, k, precision=HIGHEST)
    dk = scale * jnp.einsum("bkgts,bkgth->bksh", dx, q, precision=HIGHEST)
    dv = jnp.einsum("bkgts,bkgtv->bksv", p, do, precision=HIGHEST)
    dsinks = None if p_sink is None else -(p_sink * row).sum((0, 3, 4))
    return dq, dk, dv, None if bias is None else dx, dsinks, None


core.defvjp(core_fwd, core_bwd)


def attention(
    q, k, v, *, mask=None, segment_ids=None, soft_cap=None, sinks=None, bias=None, scale=None, save_residuals=False
):
    b, t, n, h = q.shape
    s, heads, d = k.shape[1], k.shape[2], v.shape[-1]
    g = n // heads
    scale = h**-0.5 if scale is None else scale
    seen = visible(q, k, mask=mask, segment_ids=segment_ids)
    qf = jnp.moveaxis(q.astype(jnp.float32).reshape(b, t, heads, g, h), 1, 3)
    kf, vf = clear(k, seen).swapaxes(1, 2), clear(v, seen).swapaxes(1, 2)
    if bias is not None:
        bias = jnp.broadcast_to(bias.astype(jnp.float32), (b, n, t, s)).reshape(b, heads, g, t, s)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(heads, g)
    out, lse, top = core(qf, kf, vf, bias, sinks, seen.reshape(b, heads, g, t, s), scale, soft_cap)
    out = jnp.moveaxis(out, 3, 1).reshape(b, t, n, d).astype(q.dtype)
    if save_residuals:
        return out, {"logsumexp": lse.reshape(b, n, t), "max_logits": top.reshape(b, n, t)}
    return out
