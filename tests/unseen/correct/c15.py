"""log1p of the weights besides the largest one; p = exp(x - logsumexp)."""

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


def visible(q, k, causal=False, mask=None, segment_ids=None):
    b, t, n, s = q.shape[0], q.shape[1], q.shape[2], k.shape[1]
    at = jnp.arange(t, dtype=jnp.int32)[:, None]
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


def one_group(q, k, v, ok, sink, scale):
    live = ok.any((0, 1))[:, None]
    kf, vf = (jnp.where(live, x, 0).astype(jnp.float32) for x in (k, v))
    x = jnp.einsum("tgh,sh->gts", q.astype(jnp.float32), kf, precision=HIGHEST) * scale
    x = jnp.where(ok, x, -jnp.inf)
    at = x.argmax(-1)[..., None]
    top = jax.lax.stop_gradient(x.max(-1, keepdims=True))
    empty = top == -jnp.inf
    m = jnp.where(empty, 0, top)
    first = jnp.arange(x.shape[-1]) == at
    away = jnp.where(ok, x, 0) - m
    rest = jnp.where(ok, jnp.where(first, jnp.expm1(jnp.where(first, away, 0)), jnp.exp(jnp.where(ok, away, 0))), 0)
    lse = m + jnp.log1p(rest.sum(-1, keepdims=True))
    total = lse
    if sink is not None:
        sink = sink[:, None, None]
        finite = sink > -jnp.inf
        known = jnp.where(finite, sink, 0)
        small, high = jnp.minimum(lse, known), jnp.maximum(lse, known)
        joined = high + jnp.log1p(jnp.exp(small - high))
        total = jnp.where(finite, jnp.where(empty, known, joined), lse)
    p = jnp.where(ok, jnp.exp(jnp.where(ok, x - total, 0)), 0)
    out = jnp.einsum("gts,sv->tgv", p, vf, precision=HIGHEST).astype(q.dtype)
    alone = empty if sink is None else empty & ~finite
    return out, jnp.where(alone, -jnp.inf, total)[..., 0], top[..., 0]


def attention(q, k, v, *, causal=False, mask=None, segment_ids=None, sinks=None, scale=None, save_residuals=False):
    b, t, n, h = q.shape
    s, heads, d = k.shape[1], k.shape[2], v.shape[-1]
    g = n // heads
    scale = h**-0.5 if scale is None else scale
    ok = visible(q, k, causal=causal, mask=mask, segment_ids=segment_ids).reshape(b, heads, g, t, s)
    over_heads = jax.vmap(one_group, in_axes=(1, 1, 1, 0, None if sinks is None else 0, None), out_axes=(1, 0, 0))
    over_rows = jax.vmap(over_heads, in_axes=(0, 0, 0, 0, None, None))
    sink = None if sinks is None else sinks.astype(jnp.float32).reshape(heads, g)
    out, lse, top = over_rows(q.reshape(b, t, heads, g, h), k, v, ok, sink, scale)
    out = out.reshape(b, t, n, v.shape[-1])
    if save_residuals:
        return out, {"logsumexp": lse.reshape(b, n, t), "max_logits": top.reshape(b, n, t)}
    return out
