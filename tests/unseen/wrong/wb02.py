import jax
import jax.numpy as jnp
import numpy as np

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


BLOCK_Q, BLOCK_K = 48, 64


def _keep(rows, columns, causal, window):
    i, j = np.ix_([rows[0], rows[-1]], [columns[0], columns[-1]])
    keep = np.ones((2, 2), bool)
    if causal:
        keep &= j <= i
    left, right = window or (None, None)
    if left is not None:
        keep &= j >= i - left
    if right is not None:
        keep &= j - right <= i
    return keep.any()


def _query_block(q, k, v, bias, see, sinks, scale, soft_cap):
    b, t, n, _ = q.shape
    heads = k.shape[2]
    z = jnp.where(see, _logits(q, k, scale, bias, soft_cap), -jnp.inf)
    m = z.max(axis=-1, keepdims=True, initial=-jnp.inf)
    if sinks is not None:
        sink = sinks.astype(F32).reshape(1, heads, -1, 1, 1)
        m = jnp.maximum(m, sink)
    m = jax.lax.stop_gradient(jnp.where(jnp.isfinite(m), m, 0))
    w = jnp.exp(z - m)
    total = w.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - m)
    safe = jnp.where(total == 0, 1, total)
    out = jnp.einsum("bkgts,bskv->btkgv", w / safe, v, precision=HI).reshape(b, t, n, -1)
    lse = jnp.where(total == 0, -jnp.inf, m + jnp.log(safe))
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
    t, s, heads = q.shape[1], k.shape[1], k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    see = _visible(t, s, causal, window, mask, segment_ids, kv_lengths)
    k, v = (x.astype(F32) for x in _clear_dead(see, k, v))
    see = _by_group(jnp.broadcast_to(see, (*see.shape[:2], t, s)), heads)
    if bias is not None:
        bias = _by_group(bias.astype(F32), heads)
        bias = jnp.broadcast_to(bias, (*bias.shape[:3], t, s))
    outs, sums = [], []
    for start in range(0, t, BLOCK_Q):
        rows = np.arange(start, min(start + BLOCK_Q, t))
        chosen = [np.arange(c, min(c + BLOCK_K, s)) for c in range(0, s, BLOCK_K)]
        chosen = [c for c in chosen if _keep(rows, c, causal, window)] or [np.arange(0)]
        columns = np.concatenate(chosen)
        cut = lambda x: x[..., rows, :][..., columns]
        out, lse = _query_block(
            q[:, rows].astype(F32),
            k[:, columns],
            v[:, columns],
            None if bias is None else cut(bias),
            cut(see),
            sinks,
            scale,
            soft_cap,
        )
        outs.append(out)
        sums.append(lse)
    out = jnp.concatenate(outs, axis=1).astype(q.dtype)
    return (out, {"logsumexp": jnp.concatenate(sums, axis=2)}) if save_residuals else out
