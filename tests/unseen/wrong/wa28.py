"""Serving step: write the new tokens into their pages, then attend to the pages."""

import jax
import jax.numpy as jnp


def _owners(cu_q_lens, num_seqs, total):
    row = jnp.arange(total)[:, None]
    b = jnp.arange(cu_q_lens.shape[0] - 1)
    inside = (row >= cu_q_lens[:-1]) & (row < cu_q_lens[1:]) & (b < num_seqs[0])
    return jnp.argmax(inside, 1), inside.any(1)


def _store(pages, new, slots):
    flat = pages.reshape(-1, *pages.shape[2:])
    return flat.at[slots].set(new.astype(pages.dtype), mode="drop").reshape(pages.shape)


def attention(
    q,
    k,
    v,
    k_pages,
    v_pages,
    *,
    kv_lens,
    page_indices,
    cu_q_lens,
    num_seqs,
    window=None,
    soft_cap=None,
    scale=None,
    save_residuals=False,
):
    total, n, h = q.shape
    pages, size, kv, _ = k_pages.shape
    scale = h**-0.5 if scale is None else scale
    owner, valid = _owners(cu_q_lens, num_seqs, total)
    place = kv_lens[owner] - (cu_q_lens[owner + 1] - cu_q_lens[owner]) + jnp.arange(total) - cu_q_lens[owner]
    place = jnp.where(valid, place, 0)
    slots = jnp.where(valid, page_indices[owner, place // size] * size + place % size, -1)
    k_pages, v_pages = _store(k_pages, k, slots), _store(v_pages, v, slots)

    key = jnp.arange(page_indices.shape[1] * size)
    qf = q.astype(jnp.float32).reshape(total, kv, n // kv, h)

    def sequence(carry, b):
        out, lse = carry
        mine = valid & (owner == b)
        seen = mine[:, None] & (key <= place[:, None]) & (key < kv_lens[b])
        if window is not None and window[0] is not None:
            seen &= key >= place[:, None] - window[0]
        live = seen.any(0)[:, None, None]
        used = jnp.clip(page_indices[b], 0, pages - 1)
        kb, vb = (jnp.where(live, x[used].reshape(-1, *x.shape[2:]), 0).astype(jnp.float32) for x in (k_pages, v_pages))
        z = scale * jnp.einsum("tkgh,skh->kgts", qf, kb, precision="highest")
        if soft_cap is not None:
            z = soft_cap * jnp.tanh(z / soft_cap)
        z = jnp.where(seen, z, -jnp.inf)
        m = z.max(-1)
        m = jnp.where(jnp.isfinite(m), m, 0.0)
        w = jnp.exp(z - m[..., None])
        l = w.sum(-1)
        safe = jnp.where(l > 0, l, 1.0)
        o = jnp.einsum("kgts,skv->tkgv", w / safe[..., None], vb, precision="highest").reshape(out.shape)
        e = jnp.where(l > 0, m + jnp.log(safe), -jnp.inf).reshape(n, total).T
        return (jnp.where(mine[:, None, None], o, out), jnp.where(mine[:, None], e, lse)), None

    init = jnp.zeros((total, n, v.shape[-1]), jnp.float32), jnp.full((total, n), -jnp.inf, jnp.float32)
    (out, lse), _ = jax.lax.scan(sequence, init, jnp.arange(kv_lens.shape[0]))
    out = out.astype(q.dtype)
    if save_residuals:
        return out, {"logsumexp": lse}, k_pages, v_pages
    return out, k_pages, v_pages
