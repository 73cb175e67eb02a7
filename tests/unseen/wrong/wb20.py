import jax
import jax.numpy as jnp

HI = jax.lax.Precision.HIGHEST
F32 = jnp.float32


def _sequences(total, cu, num_seqs):
    token = jnp.arange(total, dtype=jnp.int32)
    starts = jnp.where(jnp.arange(1, cu.shape[0] - 1) < num_seqs[0], cu[1:-1], total)
    seq = jnp.cumsum(jnp.zeros(total, jnp.int32).at[starts].set(1, mode="drop"), dtype=jnp.int32)
    return seq, token - cu[seq], token < cu[num_seqs[0]]


def attention(
    q,
    k,
    v,
    *,
    cu_q_lens,
    cu_kv_lens,
    num_seqs,
    causal=False,
    window=None,
    soft_cap=None,
    sinks=None,
    scale=None,
    save_residuals=False,
):
    total, n, h = q.shape
    heads = k.shape[1]
    scale = h**-0.5 if scale is None else scale
    q_seq, i, q_real = _sequences(total, cu_q_lens, num_seqs)
    k_seq, j, k_real = _sequences(k.shape[0], cu_kv_lens, num_seqs)
    q_len = cu_q_lens[q_seq + 1] - cu_q_lens[q_seq]
    kv_len = cu_kv_lens[q_seq + 1] - cu_kv_lens[q_seq]
    position, j = (i + kv_len - q_len)[:, None], j[None, :]
    see = (q_seq[:, None] == k_seq[None, :]) & q_real[:, None] & k_real[None, :]
    if causal:
        see &= j <= position
    if window is not None:
        left, right = window
        if left is not None:
            see &= j >= position - left
        if right is not None:
            see &= j - right <= position
    live = see.any(axis=0)[:, None, None]
    k, v = (jnp.where(live, x, 0).astype(F32) for x in (k, v))
    queries = jnp.where(q_real[:, None, None], q, 0).astype(F32).reshape(total, heads, n // heads, h)
    x = jnp.einsum("tkgh,skh->kgts", queries, k, precision=HI) * scale
    z = x if soft_cap is None else soft_cap * jnp.tanh(x / soft_cap)
    z = jnp.where(see, z, -jnp.inf)
    m = z.max(axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(F32).reshape(heads, n // heads, 1, 1)
        m = jnp.maximum(m, sink)
    m = jax.lax.stop_gradient(jnp.where(jnp.isfinite(m), m, 0))
    w = jnp.exp(z - m)
    total_weight = w.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total_weight = total_weight + jnp.exp(sink - m)
    safe = jnp.where(total_weight == 0, 1, total_weight)
    out = jnp.einsum("kgts,skv->tkgv", w / safe, v, precision=HI).reshape(total, n, -1).astype(q.dtype)
    lse = jnp.where(total_weight == 0, -jnp.inf, m + jnp.log(safe))[..., 0].reshape(n, total).T
    return (out, {"logsumexp": lse}) if save_residuals else out
