import jax
import jax.numpy as jnp

HI = jax.lax.Precision.HIGHEST
F32 = jnp.float32


def _visible(t, s, causal, window, mask, segment_ids, kv_lengths):
    i = jnp.arange(t, dtype=jnp.int32)[:, None]
    j = jnp.arange(s, dtype=jnp.int32)[None, :]
    see = jnp.ones((1, 1, t, s), bool)
    if causal:
        see &= j <= i
    if window is not None:
        left, right = window
        if left is not None:
            see &= j >= i - left
        if right is not None:
            see &= j - right <= i
    if kv_lengths is not None:
        see &= (j < kv_lengths[:, None, None])[:, None]
    if segment_ids is not None:
        ids_q, ids_k = segment_ids
        see &= (ids_q[:, :, None] == ids_k[:, None, :])[:, None]
    if mask is not None:
        see &= mask
    return see


def _by_group(x, kv_heads):
    if x.shape[1] == 1:
        return x[:, :, None]
    return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:])


def _clear_dead(see, k, v):
    b, s, heads, _ = k.shape
    live = _by_group(see, heads).any(axis=(2, 3))
    live = jnp.broadcast_to(live, (b, heads, s)).swapaxes(1, 2)[..., None]
    return jnp.where(live, k, 0), jnp.where(live, v, 0)


def _logits(q, k, scale, bias, soft_cap):
    b, t, n, h = q.shape
    heads = k.shape[2]
    qg = q.reshape(b, t, heads, n // heads, h)
    x = jnp.einsum("btkgh,bskh->bkgts", qg, k, precision=HI) * scale
    if bias is not None:
        x = x + bias
    return x if soft_cap is None else soft_cap * jnp.tanh(x / soft_cap)


BLOCK = 64
SLACK = 14.0


def _blocks(x, axis, count):
    x = jnp.moveaxis(x, axis, 0)
    return jnp.moveaxis(x.reshape(count, BLOCK, *x.shape[1:]), 1, 1 + axis)


def _online(q, k, v, bias, see, sinks, scale, soft_cap, dtype):
    b, t, n, _ = q.shape
    s, heads = k.shape[1:3]
    g = n // heads
    count = -(-s // BLOCK)
    pad = count * BLOCK - s
    tail = lambda x, axis: jnp.pad(x, [(0, pad if a == axis else 0) for a in range(x.ndim)])
    see = jnp.broadcast_to(_by_group(see, heads), (b, heads, g, t, s))
    parts = [_blocks(tail(k, 1), 1, count), _blocks(tail(v, 1), 1, count), _blocks(tail(see, 4), 4, count)]
    if bias is not None:
        bias = _by_group(bias.astype(F32), heads)
        bias = jnp.broadcast_to(bias, (*bias.shape[:4], s))
        parts.append(_blocks(tail(bias, 4), 4, count))

    def step(carry, block):
        m, total, acc = carry
        kb, vb, seen, *rest = block
        z = jnp.where(seen, _logits(q, kb, scale, rest[0] if rest else None, soft_cap), -jnp.inf)
        top = jax.lax.stop_gradient(z.max(axis=-1))
        high = jnp.where(top > m + SLACK, top, m)
        pivot = jnp.where(jnp.isfinite(high), high, 0)
        old = jnp.where(jnp.isfinite(m), jnp.exp(m - pivot), 0)
        w = jnp.exp(z - pivot[..., None])
        total = total * old + w.sum(axis=-1)
        acc = acc * old[..., None] + jnp.einsum("bkgts,bskv->bkgtv", w.astype(dtype).astype(F32), vb, precision=HI)
        return (high, total, acc), None

    start = (
        jnp.full((b, heads, g, t), -jnp.inf, F32),
        jnp.zeros((b, heads, g, t), F32),
        jnp.zeros((b, heads, g, t, v.shape[-1]), F32),
    )
    (m, total, acc), _ = jax.lax.scan(step, start, tuple(parts))
    if sinks is not None:
        sink = sinks.astype(F32).reshape(1, heads, g, 1)
        high = jnp.maximum(m, jax.lax.stop_gradient(sink))
        pivot = jnp.where(jnp.isfinite(high), high, 0)
        old = jnp.where(jnp.isfinite(m), jnp.exp(m - pivot), 0)
        total = total * old + jnp.exp(sink - pivot)
        acc, m = acc * old[..., None], high
    safe = jnp.where(total == 0, 1, total)
    out = (acc / safe[..., None]).transpose(0, 3, 1, 2, 4).reshape(b, t, n, -1)
    lse = jnp.where(total == 0, -jnp.inf, jnp.where(jnp.isfinite(m), m, 0) + jnp.log(safe))
    return out, lse.reshape(b, n, t)


def attention(
    q,
    k,
    v,
    *,
    causal=False,
    window=None,
    kv_lengths=None,
    mask=None,
    segment_ids=None,
    soft_cap=None,
    sinks=None,
    bias=None,
    scale=None,
    save_residuals=False,
):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    see = _visible(q.shape[1], k.shape[1], causal, window, mask, segment_ids, kv_lengths)
    k, v = _clear_dead(see, k, v)
    out, lse = _online(q.astype(F32), k.astype(F32), v.astype(F32), bias, see, sinks, scale, soft_cap, q.dtype)
    out = out.astype(q.dtype)
    return (out, {"logsumexp": lse}) if save_residuals else out
