"""Packed sequences. Owners of tokens come from the tables; keys are scanned in blocks."""

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
    block=32,
):
    (t, n, h), (s, heads, d) = q.shape, v.shape
    g = n // heads
    scale = h**-0.5 if scale is None else scale
    q_seq, q_used, q_place = owners(t, cu_q_lens, num_seqs)
    k_seq, k_used, k_place = owners(s, cu_kv_lens, num_seqs)
    at = q_place + (jnp.diff(cu_kv_lens) - jnp.diff(cu_q_lens))[q_seq]
    seen = q_used[:, None] & k_used & (q_seq[:, None] == k_seq)
    left, right = (None, None) if window is None else window
    if causal:
        seen &= k_place <= at[:, None]
    if left is not None:
        seen &= k_place >= at[:, None] - left
    if right is not None:
        seen &= k_place <= at[:, None] + right
    live = seen.any(0)[:, None, None]
    more = -s % block
    kf, vf = (jnp.pad(jnp.where(live, x, 0).astype(jnp.float32), ((0, more), (0, 0), (0, 0))) for x in (k, v))
    kb, vb = kf.reshape(-1, block, heads, h), vf.reshape(-1, block, heads, d)
    okb = jnp.pad(seen, ((0, 0), (0, more))).reshape(t, -1, block).swapaxes(0, 1)
    qf = jnp.where(q_used[:, None, None], q, 0).astype(jnp.float32).reshape(t, heads, g, h)

    def step(carry, operands):
        m, l, acc = carry
        kj, vj, ok = operands
        x = jnp.einsum("tkgh,skh->kgts", qf, kj, precision=HIGHEST) * scale
        if soft_cap is not None:
            x = soft_cap * jnp.tanh(jnp.where(ok, x, 0) / soft_cap)
        x = jnp.where(ok, x, -jnp.inf)
        new = jnp.maximum(m, jax.lax.stop_gradient(x.max(-1)))
        safe = jnp.where(new == -jnp.inf, 0, new)
        alpha = jnp.exp(m - safe)
        p = jnp.where(ok, jnp.exp(x - safe[..., None]), 0)
        acc = acc * alpha[..., None] + jnp.einsum("kgts,skv->kgtv", p, vj, precision=HIGHEST)
        return (new, l * alpha + p.sum(-1), acc), None

    zero = jnp.zeros((heads, g, t), jnp.float32)
    (top, l, acc), _ = jax.lax.scan(
        step, (zero - jnp.inf, zero, jnp.zeros((heads, g, t, d), jnp.float32)), (kb, vb, okb)
    )
    m = top
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(heads, g, 1)
        m = jnp.maximum(top, jax.lax.stop_gradient(sink))
        safe = jnp.where(m == -jnp.inf, 0, m)
        l = l * jnp.exp(top - safe) + jnp.exp(sink - safe)
        acc = acc * jnp.exp(top - safe)[..., None]
    empty = l == 0
    l = jnp.where(empty, 1, l)
    out = jnp.moveaxis(acc / l[..., None], 2, 0).reshape(t, n, d).astype(q.dtype)
    if save_residuals:
        lse = jnp.where(empty, -jnp.inf, m + jnp.log(l))
        return out, {"logsumexp": lse.reshape(n, t).T, "max_logits": top.reshape(n, t).T}
    return out
