"""Latents in pages. One step reads page number `c` of every sequence, for the queries of that sequence."""

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
    sinks=None,
    save_residuals=False,
):
    t, n, h = q.shape
    pages, size, _ = latent_pages.shape
    sequence, used, place = owners(t, cu_q_lens, num_seqs)
    filled = jnp.where(used, kv_lens[sequence], 0)
    at = filled - jnp.diff(cu_q_lens)[sequence] + place
    tables = jnp.clip(page_indices, 0, pages - 1)[sequence]
    left = None if window is None else window[0]
    qf = jnp.where(used[:, None, None], q, 0).astype(jnp.float32)

    def step(c, carry):
        m, l, acc = carry
        key = c * size + jnp.arange(size, dtype=jnp.int32)
        ok = used[:, None] & (key < filled[:, None]) & (key <= at[:, None])
        if left is not None:
            ok &= key >= at[:, None] - left
        page = jnp.where(ok[..., None], latent_pages[tables[:, c]], 0).astype(jnp.float32)
        ok = ok[:, None, :]
        x = jnp.einsum("tnh,tsh->tns", qf, page, precision=HIGHEST) * scale
        if soft_cap is not None:
            x = soft_cap * jnp.tanh(x / soft_cap)
        x = jnp.where(ok, x, -jnp.inf)
        new = jnp.maximum(m, x.max(-1))
        safe = jnp.where(new == -jnp.inf, 0, new)
        alpha = jnp.exp(m - safe)
        p = jnp.exp(x - safe[..., None])
        acc = acc * alpha[..., None] + jnp.einsum("tns,tsv->tnv", p, page[..., :value_dim], precision=HIGHEST)
        return new, l * alpha + p.sum(-1), acc

    zero = jnp.zeros((t, n), jnp.float32)
    start = (zero - jnp.inf, zero, jnp.zeros((t, n, value_dim), jnp.float32))
    top, l, acc = jax.lax.fori_loop(0, page_indices.shape[1], step, start)
    m = top
    if sinks is not None:
        m = jnp.maximum(top, sinks.astype(jnp.float32))
        safe = jnp.where(m == -jnp.inf, 0, m)
        l = l * jnp.exp(top - safe) + jnp.exp(sinks.astype(jnp.float32) - safe)
        acc = acc * jnp.exp(top - safe)[..., None]
    empty = l == 0
    l = jnp.where(empty, 1, l)
    out = (acc / l[..., None]).astype(q.dtype)
    if save_residuals:
        return out, {"logsumexp": jnp.where(empty, -jnp.inf, m + jnp.log(l)), "max_logits": top}
    return out
