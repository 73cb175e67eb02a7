"""Attention over splits of the keys, each normalised, and a merge by their logsumexp."""

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


def visible(q, k, causal=False, window=None, mask=None, shift=0):
    b, t, n, s = q.shape[0], q.shape[1], q.shape[2], k.shape[1]
    at = jnp.arange(t, dtype=jnp.int32)[:, None] + shift
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
    if mask is not None:
        seen = seen & mask
    return jnp.broadcast_to(seen, (b, n, t, s))


def clear(x, seen):
    """Zero rows of keys or values that no query of their group sees, in float32."""
    b, n, t, s = seen.shape
    live = seen.reshape(b, x.shape[2], -1, s).any(2)
    return jnp.where(live.swapaxes(1, 2)[..., None], x, 0).astype(jnp.float32)


def one_split(q, k, v, ok, bias, scale, soft_cap):
    x = jnp.einsum("btkgh,bskh->bkgts", q, k, precision=HIGHEST) * scale
    if bias is not None:
        x = x + bias
    x = jnp.where(ok, x, 0.0)
    if soft_cap is not None:
        x = soft_cap * jnp.tanh(x / soft_cap)
    x = jnp.where(ok, x, -jnp.inf)
    top = jax.lax.stop_gradient(x.max(-1, keepdims=True))
    safe = jnp.where(top == -jnp.inf, 0, top)
    e = jnp.exp(x - safe)
    l = e.sum(-1, keepdims=True)
    nothing = l == 0
    l = jnp.where(nothing, 1, l)
    p = jnp.where(ok, e / l, 0)
    out = jnp.einsum("bkgts,bskv->bkgtv", p, v, precision=HIGHEST)
    return out, jnp.where(nothing, -jnp.inf, safe + jnp.log(l))[..., 0], top[..., 0]


def attention(
    q,
    k,
    v,
    *,
    causal=False,
    window=None,
    mask=None,
    soft_cap=None,
    sinks=None,
    bias=None,
    scale=None,
    save_residuals=False,
    splits=3,
):
    b, t, n, h = q.shape
    s, heads, d = k.shape[1], k.shape[2], v.shape[-1]
    g = n // heads
    scale = h**-0.5 if scale is None else scale
    seen = visible(q, k, causal=causal, window=window, mask=mask, shift=s - t)
    size = -(-s // splits)
    pad = size * splits - s
    cut = lambda x: jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))).reshape(b, splits, size, heads, x.shape[-1])
    kb, vb = cut(clear(k, seen)), cut(clear(v, seen))
    wide = lambda x, fill: jnp.moveaxis(
        jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, pad)), constant_values=fill).reshape(b, heads, g, t, splits, size), 4, 0
    )
    ok = wide(seen, False)
    extra = None if bias is None else wide(jnp.broadcast_to(bias.astype(jnp.float32), (b, n, t, s)), 0.0)
    qf = q.astype(jnp.float32).reshape(b, t, heads, g, h)
    run = jax.vmap(
        lambda kj, vj, okj, e: one_split(qf, kj, vj, okj, e, scale, soft_cap),
        in_axes=(1, 1, 0, None if extra is None else 0),
    )
    outs, lses, tops = run(kb, vb, ok, extra)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(1, 1, heads, g, 1), (1, b, heads, g, t))
        lses = jnp.concatenate([lses, sink])
    high = jax.lax.stop_gradient(lses.max(0))
    safe = jnp.where(high == -jnp.inf, 0, high)
    share = jnp.exp(lses - safe)
    total = share.sum(0)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    out = jnp.einsum("cbkgt,cbkgtv->btkgv", (share / total)[:splits], outs, precision=HIGHEST)
    out = out.reshape(b, t, n, d).astype(q.dtype)
    if save_residuals:
        lse = jnp.where(empty, -jnp.inf, safe + jnp.log(total))
        return out, {"logsumexp": lse.reshape(b, n, t), "max_logits": tops.max(0).reshape(b, n, t)}
    return out
