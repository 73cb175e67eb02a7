"""Write the new tokens into their pages, then attend to the pages with an online softmax."""

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


def write(pages, new, index, live):
    """Rows of `new` go to the flat rows `index`; tokens that are not live go nowhere."""
    width = {2: jnp.uint16, 4: jnp.uint32}[pages.dtype.itemsize]
    flat = jax.lax.bitcast_convert_type(pages, width).reshape((-1,) + pages.shape[2:])
    index = jnp.where(live, index, flat.shape[0])
    flat = flat.at[index].set(jax.lax.bitcast_convert_type(new, width), mode="drop")
    return jax.lax.bitcast_convert_type(flat.reshape(pages.shape), pages.dtype)


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
    at = jnp.where(used, filled - jnp.diff(cu_q_lens)[sequence] + place, -1)
    tables = jnp.clip(page_indices, 0, pages - 1)[sequence]
    live = used & (at >= 0)
    page = jnp.take_along_axis(tables, jnp.maximum(at, 0)[:, None] // size, axis=1, mode="clip")[:, 0]
    index = page * size + at % size
    k_pages, v_pages = write(k_pages, k, index, live), write(v_pages, v, index, live)
    qf = jnp.where(used[:, None, None], q, 0).astype(jnp.float32).reshape(t, heads, g, h)
    left = None if window is None else window[0]

    def step(carry, operands):
        m, l, acc = carry
        number, index = operands
        key = number * size + jnp.arange(size, dtype=jnp.int32)
        ok = live[:, None] & (key <= at[:, None]) & (key < filled[:, None])
        if left is not None:
            ok &= key >= at[:, None] - left
        kj, vj = (jnp.where(ok[:, :, None, None], x[index], 0).astype(jnp.float32) for x in (k_pages, v_pages))
        x = jnp.einsum("tkgh,tskh->tkgs", qf, kj, precision=HIGHEST) * scale
        if soft_cap is not None:
            x = soft_cap * jnp.tanh(x / soft_cap)
        x = jnp.where(ok[:, None, None], x, -jnp.inf)
        new = jnp.maximum(m, x.max(-1))
        safe = jnp.where(new == -jnp.inf, 0, new)
        alpha = jnp.exp(m - safe)
        p = jnp.exp(x - safe[..., None])
        acc = acc * alpha[..., None] + jnp.einsum("tkgs,tskv->tkgv", p, vj, precision=HIGHEST)
        return (new, l * alpha + p.sum(-1), acc), None

    zero = jnp.zeros((t, heads, g), jnp.float32)
    numbers = jnp.arange(tables.shape[1], dtype=jnp.int32)
    start = (zero - jnp.inf, zero, jnp.zeros((t, heads, g, d), jnp.float32))
    (top, l, acc), _ = jax.lax.scan(step, start, (numbers, tables.T))
    m = top
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(heads, g)
        m = jnp.maximum(top, sink)
        safe = jnp.where(m == -jnp.inf, 0, m)
        l = l * jnp.exp(top - safe) + jnp.exp(sink - safe)
        acc = acc * jnp.exp(top - safe)[..., None]
    empty = l == 0
    l = jnp.where(empty, 1, l)
    out = (acc / l[..., None]).reshape(t, n, d).astype(q.dtype)
    if save_residuals:
        lse = jnp.where(empty, -jnp.inf, m + jnp.log(l)).reshape(t, n)
        return out, {"logsumexp": lse, "max_logits": top.reshape(t, n)}, k_pages, v_pages
    return out, k_pages, v_pages
