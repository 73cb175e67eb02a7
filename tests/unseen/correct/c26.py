"""Paged attention in Pallas: a program reads the pages of its token's sequence, one after the other."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

HIGHEST = jax.lax.Precision.HIGHEST


def owners(total, cu_lens, num_seqs):
    """For each token: the sequence it belongs to, whether it has one, and its place in it."""
    count = cu_lens.shape[0] - 1
    i = jnp.arange(total, dtype=jnp.int32)[:, None]
    used = jnp.arange(count, dtype=jnp.int32) < num_seqs[0]
    mine = used & (i >= cu_lens[:-1]) & (i < cu_lens[1:])
    sequence = mine.argmax(1).astype(jnp.int32)
    return sequence, mine.any(1), i[:, 0] - cu_lens[:-1][sequence]


def kernel(q_ref, at_ref, first_ref, table_ref, k_ref, v_ref, o_ref, m_ref, l_ref, *, scale, soft_cap, pages):
    head = pl.program_id(1)
    size = k_ref.shape[1]
    at, first = at_ref[0, 0], first_ref[0, 0]
    q = q_ref[...].astype(jnp.float32)

    def step(c, carry):
        m, l, acc = carry
        page = jnp.clip(table_ref[0, c], 0, pages - 1)
        key = c * size + jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)
        ok = (key <= at) & (key >= first)
        k = jnp.where(ok, k_ref[page, :, head, :], 0).astype(jnp.float32)
        v = jnp.where(ok, v_ref[page, :, head, :], 0).astype(jnp.float32)
        x = jnp.dot(q, k.T, precision=HIGHEST, preferred_element_type=jnp.float32) * scale
        if soft_cap is not None:
            x = soft_cap * jnp.tanh(x / soft_cap)
        x = jnp.where(ok.T, x, -jnp.inf)
        new = jnp.maximum(m, x.max(axis=1, keepdims=True))
        safe = jnp.where(new == -jnp.inf, 0.0, new)
        alpha = jnp.exp(m - safe)
        p = jnp.exp(x - safe)
        l = l * alpha + p.sum(axis=1, keepdims=True)
        return new, l, acc * alpha + jnp.dot(p, v, precision=HIGHEST, preferred_element_type=jnp.float32)

    g, d = o_ref.shape
    start = (jnp.full((g, 1), -jnp.inf, jnp.float32), jnp.zeros((g, 1), jnp.float32), jnp.zeros((g, d), jnp.float32))
    low = jnp.maximum(first, 0) // size
    m, l, acc = jax.lax.fori_loop(low, jnp.where(at < 0, low, at // size + 1), step, start)
    o_ref[...], m_ref[...], l_ref[...] = acc, m, l


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
    filled = jnp.where(used, kv_lens[sequence], 0)
    at = filled - jnp.diff(cu_q_lens)[sequence] + place
    at = jnp.where(used & (filled > 0), at, -1).astype(jnp.int32)
    left = None if window is None else window[0]
    first = jnp.zeros_like(at) if left is None else jnp.maximum(at - left, 0)
    tables = page_indices[sequence]
    one = pl.BlockSpec((1, 1), lambda i, j: (i, 0))
    tile = lambda width: pl.BlockSpec((None, None, g, width), lambda i, j: (i, j, 0, 0))
    whole = lambda x: pl.BlockSpec(x.shape, lambda i, j: (0,) * x.ndim)
    acc, top, l = pl.pallas_call(
        partial(kernel, scale=scale, soft_cap=soft_cap, pages=pages),
        grid=(t, heads),
        in_specs=[
            tile(h),
            one,
            one,
            pl.BlockSpec((1, tables.shape[1]), lambda i, j: (i, 0)),
            whole(k_pages),
            whole(v_pages),
        ],
        out_specs=[tile(d), tile(1), tile(1)],
        out_shape=[jax.ShapeDtypeStruct((t, heads, g, width), jnp.float32) for width in (d, 1, 1)],
        interpret=True,
    )(q.reshape(t, heads, g, h), at[:, None], first[:, None], tables, k_pages, v_pages)
    acc, top, l = acc.reshape(t, n, d), top.reshape(t, n), l.reshape(t, n)
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
