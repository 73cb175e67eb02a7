"""Packed attention; a sequence number is written out for each token, and equal numbers attend."""

import jax
import jax.numpy as jnp


def _layout(cu, num_seqs, total):
    b = jnp.arange(cu.shape[0] - 1)
    lens = jnp.where(b < num_seqs[0], cu[1:] - cu[:-1], 0)
    seq = jnp.repeat(b, lens, total_repeat_length=total)
    starts = jnp.cumsum(lens) - lens
    return seq, jnp.arange(total) - starts[seq], lens


def attention(
    q,
    k,
    v,
    *,
    cu_q_lens,
    cu_kv_lens,
    num_seqs,
    causal=False,
    soft_cap=None,
    sinks=None,
    scale=None,
    save_residuals=False,
):
    t, n, h = q.shape
    s, kv = k.shape[0], k.shape[1]
    scale = h**-0.5 if scale is None else scale
    q_seq, q_at, q_lens = _layout(cu_q_lens, num_seqs, t)
    k_seq, k_at, k_lens = _layout(cu_kv_lens, num_seqs, s)
    seen = q_seq[:, None] == k_seq[None, :]
    if causal:
        place = q_at + (k_lens - q_lens)[q_seq]
        seen &= k_at[None, :] <= place[:, None]
    live = seen.any(0)[:, None, None]
    k, v = (jnp.where(live, x, 0).astype(jnp.float32) for x in (k, v))
    qf = q.astype(jnp.float32).reshape(t, kv, n // kv, h)
    z = scale * jnp.einsum("tkgh,skh->kgts", qf, k, precision="highest")
    if soft_cap is not None:
        z = soft_cap * jnp.tanh(z / soft_cap)
    z = jnp.where(seen, z, -1e30)
    m = z.max(-1, keepdims=True)
    if sinks is not None:
        sink = sinks.reshape(kv, n // kv, 1, 1)
        m = jnp.maximum(m, sink)
    m = jax.lax.stop_gradient(m)
    w = jnp.where(seen, jnp.exp(z - m), 0.0)
    l = w.sum(-1, keepdims=True)
    if sinks is not None:
        l = l + jnp.exp(sink - m)
    safe = jnp.where(l > 0, l, 1.0)
    out = jnp.einsum("kgts,skv->tkgv", w / safe, v, precision="highest").reshape(t, n, v.shape[-1])
    out = out.astype(q.dtype)
    if save_residuals:
        lse = jnp.where(l > 0, m + jnp.log(safe), -jnp.inf)
        return out, {"logsumexp": lse.reshape(n, t).T}
    return out
