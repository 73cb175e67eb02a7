"""Partial softmax of every block of keys, merged by a binary tree."""

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


def clear(x, seen):
    """Zero rows of keys or values that no query of their group sees, in float32."""
    b, n, t, s = seen.shape
    live = seen.reshape(b, x.shape[2], -1, s).any(2)
    return jnp.where(live.swapaxes(1, 2)[..., None], x, 0).astype(jnp.float32)


def merge(a, b):
    (ma, la, oa), (mb, lb, ob) = a, b
    m = jnp.maximum(ma, mb)
    safe = jnp.where(m == -jnp.inf, 0, m)
    wa, wb = jnp.exp(ma - safe), jnp.exp(mb - safe)
    return m, la * wa + lb * wb, oa * wa[..., None] + ob * wb[..., None]


def attention(
    q,
    k,
    v,
    *,
    causal=False,
    mask=None,
    segment_ids=None,
    sinks=None,
    bias=None,
    alibi_slopes=None,
    save_residuals=False,
    block=16,
):
    b, t, n, h = q.shape
    s, heads, d = k.shape[1], k.shape[2], v.shape[-1]
    seen = visible(q, k, causal=causal, mask=mask, segment_ids=segment_ids)
    kf, vf = (jnp.repeat(clear(x, seen), n // heads, axis=2) for x in (k, v))
    x = jnp.einsum("btnh,bsnh->bnts", q.astype(jnp.float32), kf, precision=HIGHEST) / jnp.sqrt(jnp.float32(h))
    if bias is not None:
        x = x + bias.astype(jnp.float32)
    if alibi_slopes is not None:
        slope = jax.lax.stop_gradient(alibi_slopes).astype(jnp.float32)[:, None, None]
        distance = jnp.abs(jnp.arange(t)[:, None] + (s - t) - jnp.arange(s)[None, :]).astype(jnp.float32)
        x = x - slope * distance
    x = jnp.where(seen, x, -jnp.inf)
    count = -(-s // block)
    pad = count * block - s
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, pad)), constant_values=-jnp.inf).reshape(b, n, t, count, block)
    ok = jnp.pad(seen, ((0, 0), (0, 0), (0, 0), (0, pad))).reshape(b, n, t, count, block)
    vb = jnp.pad(vf, ((0, 0), (0, pad), (0, 0), (0, 0))).reshape(b, count, block, n, d)
    m = jax.lax.stop_gradient(x.max(-1))
    weights = jnp.where(ok, jnp.exp(x - jnp.where(m == -jnp.inf, 0, m)[..., None]), 0)
    o = jnp.einsum("bntcs,bcsnv->bntcv", weights, vb, precision=HIGHEST)
    parts = [(m[..., c], weights[..., c, :].sum(-1), o[..., c, :]) for c in range(count)]
    while len(parts) > 1:
        pairs = [merge(parts[c], parts[c + 1]) for c in range(0, len(parts) - 1, 2)]
        parts = pairs + ([parts[-1]] if len(parts) % 2 else [])
    m, l, o = parts[0]
    pivot = m
    if sinks is not None:
        sink = sinks.astype(jnp.float32)[None, :, None]
        finite = sink > -jnp.inf
        known = jnp.where(finite, sink, 0)
        one = jnp.where(finite, jnp.exp(known - jax.lax.stop_gradient(known)), 0)
        alone = (jax.lax.stop_gradient(jnp.broadcast_to(sink, m.shape)), one, jnp.zeros_like(o))
        pivot, l, o = merge((m, l, o), alone)
    empty = l == 0
    l = jnp.where(empty, 1, l)
    out = (o / l[..., None]).swapaxes(1, 2).astype(q.dtype)
    if save_residuals:
        return out, {"logsumexp": jnp.where(empty, -jnp.inf, pivot + jnp.log(l)), "max_logits": m}
    return out
