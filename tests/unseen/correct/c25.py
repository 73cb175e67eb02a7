"""Paged attention: gather the pages of a sequence, attend with all queries, keep the rows of its own."""

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


def softmax_sum(x, ok, v, sinks, contract):
    """Weighted values, logsumexp and largest logit. `x` is [..., N, T, S]; `sinks` is [N] or None."""
    x = jnp.where(ok, x, -jnp.inf)
    top = x.max(-1)
    pivot = top if sinks is None else jnp.maximum(top, sinks.astype(jnp.float32)[:, None])
    pivot = jnp.where(pivot == -jnp.inf, 0, pivot)
    e = jnp.exp(x - pivot[..., None])
    l = e.sum(-1)
    if sinks is not None:
        l = l + jnp.exp(sinks.astype(jnp.float32)[:, None] - pivot)
    empty = l == 0
    l = jnp.where(empty, 1, l)
    return contract(e / l[..., None], v), jnp.where(empty, -jnp.inf, pivot + jnp.log(l)), top


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
    t, n, h = q.shape
    pages, size, heads, _ = k_pages.shape
    d, g = v_pages.shape[-1], n // heads
    scale = h**-0.5 if scale is None else scale
    sequence, used, place = owners(t, cu_q_lens, num_seqs)
    qf = jnp.where(used[:, None, None], q, 0).astype(jnp.float32).reshape(t, heads, g, h)
    j = jnp.arange(page_indices.shape[1] * size, dtype=jnp.int32)

    def one(operands):
        index, filled, queries, b = operands
        at = (filled - queries + place)[:, None]
        ok = (used & (sequence == b))[:, None] & (j < filled) & (j <= at)
        if window is not None and window[0] is not None:
            ok &= j >= at - window[0]
        live = ok.any(0)[:, None, None]
        index = jnp.clip(index, 0, pages - 1)
        k = jnp.where(live, k_pages[index].reshape(-1, heads, h), 0).astype(jnp.float32)
        v = jnp.where(live, v_pages[index].reshape(-1, heads, d), 0).astype(jnp.float32)
        x = jnp.einsum("tkgh,skh->kgts", qf, k, precision=HIGHEST) * scale
        if soft_cap is not None:
            x = soft_cap * jnp.tanh(x / soft_cap)
        contract = lambda p, v: jnp.einsum("kgts,skv->tkgv", p.reshape(heads, g, t, -1), v, precision=HIGHEST)
        return softmax_sum(x.reshape(n, t, -1), ok, v, sinks, contract)

    count = page_indices.shape[0]
    numbers = jnp.arange(count, dtype=jnp.int32)
    out, lse, top = jax.lax.map(one, (page_indices, kv_lens, jnp.diff(cu_q_lens), numbers))
    rows = jnp.arange(t)
    out = out[sequence, rows].reshape(t, n, d).astype(q.dtype)
    if save_residuals:
        return out, {"logsumexp": lse[sequence, :, rows], "max_logits": top[sequence, :, rows]}
    return out
