"""Decoding from a ring-buffer cache (heads before slots)."""

import jax.numpy as jnp


def _token_in_slot(cache_seqlens, slots):
    """The latest token of each sequence that was written to each slot; negative if there is none."""
    slot = jnp.arange(slots)[None, :]
    newest = cache_seqlens[:, None] - 1
    turns = jnp.floor((newest - slot) / slots).astype(jnp.int32)
    return slot + turns * slots


def attention(
    q, k_cache, v_cache, *, cache_seqlens, window=None, soft_cap=None, sinks=None, scale=None, save_residuals=False
):
    rows, t, n, h = q.shape
    kv, slots = k_cache.shape[1], k_cache.shape[2]
    g = n // kv
    scale = h**-0.5 if scale is None else scale
    token = _token_in_slot(cache_seqlens, slots)[:, None, :]
    place = (cache_seqlens[:, None] - t + jnp.arange(t))[:, :, None]
    seen = (token >= 0) & (token <= place)
    if window is not None and window[0] is not None:
        seen &= token >= place - window[0]
    live = seen.any(1)[:, None, :, None]
    k, v = (jnp.where(live, x, 0).astype(jnp.float32) for x in (k_cache, v_cache))
    qf = q.astype(jnp.float32).reshape(rows, t, kv, g, h)
    z = scale * jnp.einsum("rtkgh,rksh->rkgts", qf, k, precision="highest")
    if soft_cap is not None:
        z = soft_cap * jnp.tanh(z / soft_cap)
    seen = seen[:, None, None]
    z = jnp.where(seen, z, -jnp.inf)
    m = z.max(-1)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, kv, g, 1)
        m = jnp.maximum(m, sink)
    m = jnp.where(jnp.isfinite(m), m, 0.0)
    w = jnp.exp(z - m[..., None])
    l = w.sum(-1)
    if sinks is not None:
        l = l + jnp.exp(sink - m)
    safe = jnp.where(l > 0, l, 1.0)
    out = jnp.einsum("rkgts,rksv->rtkgv", w / safe[..., None], v, precision="highest")
    out = out.reshape(rows, t, n, v.shape[-1]).astype(q.dtype)
    if save_residuals:
        return out, {"logsumexp": jnp.where(l > 0, m + jnp.log(safe), -jnp.inf).reshape(rows, n, t)}
    return out
