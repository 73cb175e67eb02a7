"""Compute attention over pages in plain JAX: a base for planted faults."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from conformance import declare

F32 = jnp.float32


@declare(empty_rows="zero")
def attention(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    *,
    kv_lens: Any,
    page_indices: Any,
    cu_q_lens: Any,
    num_seqs: Any,
    window: Any = None,
    soft_cap: Any = None,
    sinks: Any = None,
    scale: Any = None,
    save_residuals: Any = False,
) -> Any:
    total, n, h = q.shape
    pages, size, kv_heads, _ = k_pages.shape
    rows, width = page_indices.shape
    group = n // kv_heads
    scale = h**-0.5 if scale is None else scale
    live = jnp.arange(rows) < num_seqs[0]
    starts, ends = cu_q_lens[:-1], cu_q_lens[1:]
    token = jnp.arange(total)
    of = (token[:, None] >= starts) & (token[:, None] < ends) & live  # [total, rows]
    real = of.any(1)
    row = jnp.argmax(of, axis=1)
    lens = kv_lens[row]
    position = lens - (ends - starts)[row] + token - starts[row]
    table = jnp.clip(page_indices, 0, pages - 1)[row]  # [total, width]
    j = jnp.arange(width * size)
    ok = real[:, None] & (j <= position[:, None]) & (j < lens[:, None])
    if window is not None and window[0] is not None:
        ok &= j >= position[:, None] - window[0]
    k = k_pages[table].reshape(total, width * size, kv_heads, h)
    v = v_pages[table].reshape(total, width * size, kv_heads, -1)
    k, v = (jnp.where(ok[:, :, None, None], x.astype(F32), 0.0) for x in (k, v))
    x = jnp.einsum("tkgh,tskh->tkgs", q.astype(F32).reshape(total, kv_heads, group, h), k).reshape(total, n, -1) * scale
    if soft_cap is not None:
        x = soft_cap * jnp.tanh(x / soft_cap)
    z = jnp.where(ok[:, None], x, -jnp.inf)
    top = z.max(-1, keepdims=True)
    m = top
    if sinks is not None:
        sink = sinks.astype(F32)[None, :, None]
        m = jnp.maximum(m, sink)
    m = jnp.where(jnp.isfinite(m), m, 0.0)
    p = jnp.exp(z - m)
    sums = p.sum(-1, keepdims=True)
    if sinks is not None:
        sums = sums + jnp.exp(sink - m)
    full = jnp.where(sums == 0, 1.0, sums)
    out = jnp.einsum("tkgs,tskv->tkgv", (p / full).reshape(total, kv_heads, group, -1), v).reshape(total, n, -1)
    lse = jnp.where(sums == 0, -jnp.inf, m + jnp.log(full))
    out = out.astype(q.dtype)
    return (out, {"logsumexp": lse[..., 0], "max_logits": top[..., 0]}) if save_residuals else out
