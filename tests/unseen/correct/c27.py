"""Paged attention over int8 or fp8 pages, or plain ones. Scales are applied to logits and probabilities in f32."""

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


def owners(total, cu_lens, num_seqs):
    """For each token: the sequence it belongs to, whether it has one, and its place in it."""
    count = cu_lens.shape[0] - 1
    i = jnp.arange(total, dtype=jnp.int32)[:, None]
    used = jnp.arange(count, dtype=jnp.int32) < num_seqs[0]
    mine = used & (i >= cu_lens[:-1]) & (i < cu_lens[1:])
    sequence = mine.argmax(1).astype(jnp.int32)
    return sequence, mine.any(1), i[:, 0] - cu_lens[:-1][sequence]


def attention(
    q,
    k_pages,
    v_pages,
    *,
    kv_lens,
    page_indices,
    cu_q_lens,
    num_seqs,
    k_scales=None,
    v_scales=None,
    k_scale=None,
    v_scale=None,
    window=None,
    soft_cap=None,
    sinks=None,
    scale=None,
    save_residuals=False,
):
    t, n, h = q.shape
    pages, size, heads, _ = k_pages.shape
    d, g, count = v_pages.shape[-1], n // heads, page_indices.shape[0]
    scale = h**-0.5 if scale is None else scale
    sequence, used, place = owners(t, cu_q_lens, num_seqs)
    filled = jnp.where(used, kv_lens[sequence], 0)
    at = filled - jnp.diff(cu_q_lens)[sequence] + place
    s = page_indices.shape[1] * size
    j = jnp.arange(s, dtype=jnp.int32)
    seen = used[:, None] & (j < filled[:, None]) & (j <= at[:, None])
    if window is not None and window[0] is not None:
        seen &= j >= at[:, None] - window[0]
    mine = seen[:, None, :] & (sequence[:, None] == jnp.arange(count, dtype=jnp.int32))[:, :, None]
    live = mine.any(0)
    index = jnp.clip(page_indices, 0, pages - 1)

    def gather(stored):
        x = stored[index].astype(jnp.float32)
        x = x.reshape((count, s) + x.shape[3:])
        return jnp.where(live.reshape(live.shape + (1,) * (x.ndim - 2)), x, 0)

    k, v = gather(k_pages), gather(v_pages)
    qf = jnp.where(used[:, None, None], q, 0).astype(jnp.float32).reshape(t, heads, g, h)
    x = jnp.einsum("tkgh,cskh->tkgcs", qf, k, precision=HIGHEST) * scale
    if k_scales is not None:
        x = x * jnp.moveaxis(gather(k_scales), 2, 0)[:, None]
    if k_scale is not None:
        x = x * k_scale
    if soft_cap is not None:
        x = soft_cap * jnp.tanh(x / soft_cap)
    x = jnp.where(mine[:, None, None], x, -jnp.inf)
    top = x.max((-2, -1))
    pivot = top
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(heads, g)
        pivot = jnp.maximum(top, sink)
    pivot = jnp.where(pivot == -jnp.inf, 0, pivot)
    e = jnp.exp(x - pivot[..., None, None])
    l = e.sum((-2, -1))
    if sinks is not None:
        l = l + jnp.exp(sink - pivot)
    empty = l == 0
    l = jnp.where(empty, 1, l)
    p = e / l[..., None, None]
    if v_scales is not None:
        p = p * jnp.moveaxis(gather(v_scales), 2, 0)[:, None]
    out = jnp.einsum("tkgcs,cskv->tkgv", p, v, precision=HIGHEST).reshape(t, n, d)
    if v_scale is not None:
        out = out * v_scale
    out = out.astype(q.dtype)
    if save_residuals:
        lse = jnp.where(empty, -jnp.inf, pivot + jnp.log(l))
        return out, {"logsumexp": lse.reshape(t, n), "max_logits": top.reshape(t, n)}
    return out
