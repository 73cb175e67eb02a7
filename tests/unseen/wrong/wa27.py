"""Ragged paged attention: walks over the pages of each sequence, from the first one in the window."""

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
    window=None,
    soft_cap=None,
    sinks=None,
    scale=None,
    save_residuals=False,
):
    total, n, h = q.shape
    pages, size, kv, depth = v_pages.shape
    g = n // kv
    scale = h**-0.5 if scale is None else scale
    left = None if window is None else window[0]
    rows = jnp.arange(total)
    qf = q.astype(jnp.float32).reshape(total, kv, g, h)

    def sequence(carry, b):
        start, stop, length = cu_q_lens[b], cu_q_lens[b + 1], kv_lens[b]
        mine = (rows >= start) & (rows < stop) & (b < num_seqs[0])
        place = length - (stop - start) + rows - start
        first = 0 if left is None else jnp.maximum(length - 1 - left, 0) // size

        def page(state, index):
            acc, m, l = state
            key = index * size + jnp.arange(size)
            seen = mine[:, None] & (key <= place[:, None]) & (key < length) & (index >= first)
            if left is not None:
                seen &= key >= place[:, None] - left
            at = jnp.clip(page_indices[b, index], 0, pages - 1)
            live = seen.any(0)[:, None, None]
            kb, vb = (jnp.where(live, x[at], 0).astype(jnp.float32) for x in (k_pages, v_pages))
            z = scale * jnp.einsum("tkgh,skh->kgts", qf, kb, precision="highest")
            if soft_cap is not None:
                z = soft_cap * jnp.tanh(z / soft_cap)
            z = jnp.where(seen, z, -1e30)
            new = jnp.maximum(m, z.max(-1))
            w = jnp.where(seen, jnp.exp(z - new[..., None]), 0.0)
            alpha = jnp.exp(m - new)
            acc = acc * alpha[..., None] + jnp.einsum("kgts,skv->kgtv", w, vb, precision="highest")
            return (acc, new, l * alpha + w.sum(-1)), None

        return jax.lax.scan(page, carry, jnp.arange(page_indices.shape[1]))

    init = (
        jnp.zeros((kv, g, total, depth), jnp.float32),
        jnp.full((kv, g, total), -1e30, jnp.float32),
        jnp.zeros((kv, g, total), jnp.float32),
    )
    (acc, m, l), _ = jax.lax.scan(sequence, init, jnp.arange(kv_lens.shape[0]))
    if sinks is not None:
        sink = sinks.reshape(kv, g, 1)
        new = jnp.maximum(m, sink)
        alpha = jnp.exp(m - new)
        acc, l, m = acc * alpha[..., None], l * alpha + jnp.exp(sink - new), new
    safe = jnp.where(l > 0, l, 1.0)
    out = jnp.moveaxis(acc / safe[..., None], 2, 0).reshape(total, n, depth).astype(q.dtype)
    if save_residuals:
        lse = jnp.where(l > 0, m + jnp.log(safe), -jnp.inf)
        return out, {"logsumexp": lse.reshape(n, total).T}
    return out
