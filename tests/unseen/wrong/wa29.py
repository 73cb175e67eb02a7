"""Ragged paged attention over int8 or fp8 pages with one calibrated scale for keys and one for values."""

import jax
import jax.numpy as jnp


def attention(
    q,
    k_pages,
    v_pages,
    *,
    kv_lens,
    page_indices,
    cu_q_lens,
    num_seqs,
    k_scale,
    v_scale,
    window=None,
    soft_cap=None,
    sinks=None,
    scale=None,
    save_residuals=False,
):
    total, n, h = q.shape
    pages, size, kv, depth = v_pages.shape
    g = n // kv
    factor = scale if scale is not None else h**-0.5 * k_scale
    rows = jnp.arange(total)
    key = jnp.arange(page_indices.shape[1] * size)
    qf = q.astype(jnp.float32).reshape(total, kv, g, h)
    sink = None if sinks is None else sinks.astype(jnp.float32).reshape(kv, g, 1)

    def sequence(carry, b):
        out, lse = carry
        start, stop = cu_q_lens[b], cu_q_lens[b + 1]
        mine = (rows >= start) & (rows < stop) & (b < num_seqs[0])
        place = kv_lens[b] - (stop - start) + rows - start
        seen = mine[:, None] & (key <= place[:, None]) & (key < kv_lens[b])
        if window is not None and window[0] is not None:
            seen &= key >= place[:, None] - window[0]
        live = seen.any(0)[:, None, None]
        used = jnp.clip(page_indices[b], 0, pages - 1)
        kb, vb = (
            jnp.where(live, x[used].reshape(-1, *x.shape[2:]).astype(jnp.float32), 0.0) for x in (k_pages, v_pages)
        )
        z = factor * jnp.einsum("tkgh,skh->kgts", qf, kb, precision="highest")
        if soft_cap is not None:
            z = soft_cap * jnp.tanh(z / soft_cap)
        z = jnp.where(seen, z, -jnp.inf)
        m = z.max(-1)
        if sink is not None:
            m = jnp.maximum(m, sink)
        m = jnp.where(jnp.isfinite(m), m, 0.0)
        w = jnp.exp(z - m[..., None])
        l = w.sum(-1)
        if sink is not None:
            l = l + jnp.exp(sink - m)
        safe = jnp.where(l > 0, l, 1.0)
        o = v_scale * jnp.einsum("kgts,skv->tkgv", w / safe[..., None], vb, precision="highest")
        e = jnp.where(l > 0, m + jnp.log(safe), -jnp.inf).reshape(n, total).T
        o = o.reshape(out.shape)
        return (jnp.where(mine[:, None, None], o, out), jnp.where(mine[:, None], e, lse)), None

    init = jnp.zeros((total, n, depth), jnp.float32), jnp.full((total, n), -jnp.inf, jnp.float32)
    (out, lse), _ = jax.lax.scan(sequence, init, jnp.arange(kv_lens.shape[0]))
    out = out.astype(q.dtype)
    return (out, {"logsumexp": lse}) if save_residuals else out
