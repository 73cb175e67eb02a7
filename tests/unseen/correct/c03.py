"""Strided key blocks and powers of two. Block r holds the keys r, r + stride, r + 2 stride, ..."""

import math

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST
LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


def visible(q, k, causal=False, window=None, mask=None, kv_lengths=None):
    b, t, n, s = q.shape[0], q.shape[1], q.shape[2], k.shape[1]
    at = jnp.arange(t, dtype=jnp.int32)[:, None]
    j = jnp.arange(s, dtype=jnp.int32)[None, :]
    seen = jnp.ones((1, 1, t, s), bool)
    if causal:
        seen &= j <= at
    if window is not None:
        left, right = window
        if left is not None:
            seen &= j >= at - left
        if right is not None:
            seen &= j <= at + right
    if kv_lengths is not None:
        seen = seen & (j < kv_lengths[:, None, None, None])
    if mask is not None:
        seen = seen & mask
    return jnp.broadcast_to(seen, (b, n, t, s))


def clear(x, seen):
    """Zero rows of keys or values that no query of their group sees, in float32."""
    b, n, t, s = seen.shape
    live = seen.reshape(b, x.shape[2], -1, s).any(2)
    return jnp.where(live.swapaxes(1, 2)[..., None], x, 0).astype(jnp.float32)


def attention(
    q,
    k,
    v,
    *,
    causal=False,
    window=None,
    mask=None,
    kv_lengths=None,
    soft_cap=None,
    sinks=None,
    scale=None,
    save_residuals=False,
    stride=4,
):
    b, t, n, h = q.shape
    s, heads, d = k.shape[1], k.shape[2], v.shape[-1]
    g = n // heads
    scale = h**-0.5 if scale is None else scale
    seen = visible(q, k, causal=causal, window=window, mask=mask, kv_lengths=kv_lengths)
    rows = -(-s // stride)
    pad = rows * stride - s

    def strided(x, axis):
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, pad)
        x = jnp.pad(x, widths)
        x = x.reshape(x.shape[:axis] + (rows, stride) + x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis + 1, 0)

    kb, vb = strided(clear(k, seen), 1), strided(clear(v, seen), 1)
    okb = strided(seen.reshape(b, heads, g, t, s), 4)
    qf = q.astype(jnp.float32).reshape(b, t, heads, g, h)

    def step(carry, operands):
        m, l, acc = carry
        kj, vj, ok = operands
        x = jnp.einsum("btkgh,bskh->bkgts", qf, kj, precision=HIGHEST)
        if soft_cap is None:
            x = jnp.where(ok, x, 0) * (scale * LOG2E)
        else:
            x = jnp.tanh(jnp.where(ok, x, 0) * (scale / soft_cap)) * (soft_cap * LOG2E)
        x = jnp.where(ok, x, -jnp.inf)
        new = jnp.maximum(m, jax.lax.stop_gradient(x.max(-1)))
        safe = jnp.where(new == -jnp.inf, 0, new)
        alpha = jnp.exp2(m - safe)
        p = jnp.where(ok, jnp.exp2(x - safe[..., None]), 0)
        l = l * alpha + p.sum(-1)
        acc = acc * alpha[..., None] + jnp.einsum("bkgts,bskv->bkgtv", p, vj, precision=HIGHEST)
        return (new, l, acc), None

    shape = (b, heads, g, t)
    start = (
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(shape + (d,), jnp.float32),
    )
    (m, l, acc), _ = jax.lax.scan(step, start, (kb, vb, okb))
    empty = l == 0
    l = jnp.where(empty, 1, l)
    out = acc / l[..., None]
    lse = jnp.where(empty, 0, m) * LN2 + jnp.log(l)
    if sinks is None:
        full = jnp.where(empty, -jnp.inf, lse)
    else:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(heads, g, 1), shape)
        out = out * jax.nn.sigmoid(lse - sink)[..., None]
        none = sink == -jnp.inf
        high = jax.lax.stop_gradient(jnp.maximum(lse, sink))
        both = high + jnp.log(jnp.exp(lse - high) + jnp.exp(sink - high))
        full = jnp.where(empty, jnp.where(none, -jnp.inf, sink), jnp.where(none, lse, both))
    out = jnp.moveaxis(out, 3, 1).reshape(b, t, n, d).astype(q.dtype)
    if save_residuals:
        return out, {"logsumexp": full.reshape(b, n, t), "max_logits": (m * LN2).reshape(b, n, t)}
    return out
