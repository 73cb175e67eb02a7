"""Absorbed multi-head latent attention over pages: compressed and rotary parts scored apart."""

import jax
import jax.numpy as jnp


def attention(
    q,
    latent_pages,
    *,
    value_dim,
    scale,
    kv_lens,
    page_indices,
    cu_q_lens,
    num_seqs,
    window=None,
    soft_cap=None,
    save_residuals=False,
):
    total, n, depth = q.shape
    pages, size, _ = latent_pages.shape
    rope = depth - value_dim
    rows = jnp.arange(total)
    key = jnp.arange(page_indices.shape[1] * size)
    q_c = q[..., :value_dim].astype(jnp.float32)
    q_r = q[..., -rope:].astype(jnp.float32)

    def sequence(carry, b):
        out, lse = carry
        start, stop = cu_q_lens[b], cu_q_lens[b + 1]
        mine = (rows >= start) & (rows < stop) & (b < num_seqs[0])
        place = kv_lens[b] - (stop - start) + rows - start
        seen = mine[:, None] & (key <= place[:, None]) & (key < kv_lens[b])
        if window is not None and window[0] is not None:
            seen &= key >= place[:, None] - window[0]
        used = jnp.clip(page_indices[b], 0, pages - 1)
        latent = latent_pages[used].reshape(-1, depth).astype(jnp.float32)
        latent = jnp.where(seen.any(0)[:, None], latent, 0.0)
        c, r = latent[:, :value_dim], latent[:, -rope:]
        z = jnp.einsum("tnc,sc->nts", q_c, c, precision="highest")
        z = scale * (z + jnp.einsum("tnr,sr->nts", q_r, r, precision="highest"))
        if soft_cap is not None:
            z = soft_cap * jnp.tanh(z / soft_cap)
        z = jnp.where(seen, z, -jnp.inf)
        m = z.max(-1)
        m = jnp.where(jnp.isfinite(m), m, 0.0)
        w = jnp.exp(z - m[..., None])
        l = w.sum(-1)
        safe = jnp.where(l > 0, l, 1.0)
        o = jnp.einsum("nts,sc->tnc", w / safe[..., None], c, precision="highest")
        e = jnp.where(l > 0, m + jnp.log(safe), -jnp.inf).T
        return (jnp.where(mine[:, None, None], o, out), jnp.where(mine[:, None], e, lse)), None

    init = jnp.zeros((total, n, value_dim), jnp.float32), jnp.full((total, n), -jnp.inf, jnp.float32)
    (out, lse), _ = jax.lax.scan(sequence, init, jnp.arange(kv_lens.shape[0]))
    out = out.astype(q.dtype)
    return (out, {"logsumexp": lse}) if save_residuals else out
