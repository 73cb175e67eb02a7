import jax
import jax.numpy as jnp

HI = jax.lax.Precision.HIGHEST
F32 = jnp.float32


def _tokens(total, kv_lens, cu_q_lens, num_seqs):
    """Sequence, position and length of every query; rows past the last sequence are not `real`."""
    rows = kv_lens.shape[0]
    ends = jnp.where(jnp.arange(1, rows + 1) <= num_seqs[0], cu_q_lens[1:], 2**30)
    token = jnp.arange(total, dtype=jnp.int32)
    seq = (ends[None, :] <= token[:, None]).sum(axis=1, dtype=jnp.int32)
    real = seq < num_seqs[0]
    seq = jnp.minimum(seq, rows - 1)
    length = jnp.where(real, kv_lens[seq], 0)
    first, last = cu_q_lens[seq], cu_q_lens[seq + 1]
    return seq, length - (last - first) + token - first, length, last - first


def _page(q, k, v, seen, scale, soft_cap):
    """Largest logit, sum of weights and weighted values of one page for each query."""
    k = jnp.where(seen[:, :, None, None], k, 0).astype(F32)
    v = jnp.where(seen[:, :, None, None], v, 0).astype(F32)
    x = jnp.einsum("tkgh,tskh->tkgs", q, k, precision=HI) * scale
    z = x if soft_cap is None else soft_cap * jnp.tanh(x / soft_cap)
    z = jnp.where(seen[:, None, None, :], z, -jnp.inf)
    m = z.max(axis=-1)
    w = jnp.exp(z - jnp.where(jnp.isfinite(m), m, 0)[..., None])
    return m, w.sum(axis=-1), jnp.einsum("tkgs,tskv->tkgv", w, v, precision=HI)


def _merge(a, b):
    m = jnp.maximum(a[0], b[0])
    pivot = jnp.where(jnp.isfinite(m), m, 0)
    wa, wb = jnp.exp(a[0] - pivot), jnp.exp(b[0] - pivot)
    return m, a[1] * wa + b[1] * wb, a[2] * wa[..., None] + b[2] * wb[..., None]


def _finish(state, sinks, shape, dtype):
    m, total, acc = state
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(F32).reshape(1, *m.shape[1:]), m.shape)
        m, total, acc = _merge((m, total, acc), (sink, jnp.ones_like(m), jnp.zeros_like(acc)))
    safe = jnp.where(total == 0, 1, total)
    lse = jnp.where(total == 0, -jnp.inf, jnp.where(jnp.isfinite(m), m, 0) + jnp.log(safe))
    return (acc / safe[..., None]).reshape(shape).astype(dtype), lse.reshape(shape[:2])


def _write(pages, new, place):
    flat = pages.reshape(-1, *pages.shape[2:])
    return flat.at[place].set(new, mode="drop").reshape(pages.shape)


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
    total, n, h = q.shape
    pages, size, heads, depth = v_pages.shape
    scale = h**-0.5 if scale is None else scale
    left = None if window is None else window[0]
    seq, position, length, _ = _tokens(total, kv_lens, cu_q_lens, num_seqs)
    j = jnp.clip(position, 0)
    place = page_indices[seq, jnp.minimum(j // size, page_indices.shape[1] - 1)] * size + j % size
    place = jnp.where((position >= 0) & (position < length), place, -1)
    k_pages, v_pages = _write(k_pages, k, place), _write(v_pages, v, place)
    grouped = q.astype(F32).reshape(total, heads, n // heads, h)

    def step(state, column):
        j = column * size + jnp.arange(size, dtype=jnp.int32)[None, :]
        seen = (j <= position[:, None]) & (j < length[:, None])
        if left is not None:
            seen &= j >= position[:, None] - left
        page = jnp.clip(page_indices[seq, column], 0, pages - 1)
        return _merge(state, _page(grouped, k_pages[page], v_pages[page], seen, scale, soft_cap)), None

    rows = (total, heads, n // heads)
    state = jnp.full(rows, -jnp.inf, F32), jnp.zeros(rows, F32), jnp.zeros((*rows, depth), F32)
    state, _ = jax.lax.scan(step, state, jnp.arange(page_indices.shape[1], dtype=jnp.int32))
    out, lse = _finish(state, sinks, (total, n, depth), q.dtype)
    return ((out, {"logsumexp": lse}) if save_residuals else out), k_pages, v_pages
