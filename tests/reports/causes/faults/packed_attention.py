"""Compute attention over packed sequences in plain JAX: a base for planted faults."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from conformance import declare

F32 = jnp.float32


@declare(empty_rows="zero")
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_q_lens: Any,
    cu_kv_lens: Any,
    num_seqs: Any,
    causal: Any = False,
    window: Any = None,
    soft_cap: Any = None,
    sinks: Any = None,
    scale: Any = None,
    save_residuals: Any = False,
) -> Any:
    total, n, h = q.shape
    total_kv, kv_heads, _ = k.shape
    group = n // kv_heads
    scale = h**-0.5 if scale is None else scale
    live = jnp.arange(len(cu_q_lens) - 1) < num_seqs[0]

    def place(cu: Any, length: Any) -> Any:
        token = jnp.arange(length)
        of = (token[:, None] >= cu[:-1]) & (token[:, None] < cu[1:]) & live
        row = jnp.argmax(of, axis=1)
        return of.any(1), row, token - cu[row], (cu[1:] - cu[:-1])

    q_real, q_row, q_place, q_lens = place(cu_q_lens, total)
    k_real, k_row, k_place, k_lens = place(cu_kv_lens, total_kv)
    position = q_place + (k_lens - q_lens)[q_row]
    ok = q_real[:, None] & k_real & (q_row[:, None] == k_row)
    if causal:
        ok &= k_place <= position[:, None]
    if window is not None:
        left, right = window
        if left is not None:
            ok &= k_place >= position[:, None] - left
        if right is not None:
            ok &= k_place <= position[:, None] + right
    seen = ok.any(0)[:, None, None]
    qf = jnp.where(q_real[:, None, None], q.astype(F32), 0.0)
    kf, vf = (jnp.where(seen, x.astype(F32), 0.0) for x in (k, v))
    x = jnp.einsum("tkgh,skh->kgts", qf.reshape(total, kv_heads, group, h), kf).reshape(n, total, total_kv) * scale
    if soft_cap is not None:
        x = soft_cap * jnp.tanh(x / soft_cap)
    z = jnp.where(ok, x, -jnp.inf)
    top = z.max(-1, keepdims=True)
    m = top
    if sinks is not None:
        sink = sinks.astype(F32)[:, None, None]
        m = jnp.maximum(m, sink)
    m = jax.lax.stop_gradient(jnp.where(jnp.isfinite(m), m, 0.0))
    p = jnp.exp(z - m)
    sums = p.sum(-1, keepdims=True)
    if sinks is not None:
        sums = sums + jnp.where(q_real[:, None], jnp.exp(sink - m), 0.0)
    full = jnp.where(sums == 0, 1.0, sums)
    w = (p / full).reshape(kv_heads, group, total, total_kv)
    out = jnp.einsum("kgts,skv->tkgv", w, vf).reshape(total, n, -1)
    lse = jnp.where(sums == 0, -jnp.inf, m + jnp.log(full))
    out = out.astype(q.dtype)
    return (out, {"logsumexp": lse[..., 0].T, "max_logits": top[..., 0].T}) if save_residuals else out
