"""Packed (variable-length) attention with a backward pass of its own."""

import functools

import jax
import jax.numpy as jnp


def _dot(eq, a, b):
    return jnp.einsum(eq, a, b, precision="highest")


def _owner(cu, num_seqs, total):
    """Sequence and index within it, for each token; sequence -1 past the last one."""
    b = jnp.arange(cu.shape[0] - 1)
    row = jnp.arange(total)[:, None]
    inside = (row >= cu[:-1]) & (row < cu[1:]) & (b < num_seqs[0])
    owner = jnp.where(inside.any(1), jnp.argmax(inside, 1), -1)
    return owner, jnp.arange(total) - jnp.where(owner >= 0, cu[owner], 0)


def _tables(cu_q, cu_kv, num_seqs, tq, tk):
    q_seq, q_at = _owner(cu_q, num_seqs, tq)
    k_seq, k_at = _owner(cu_kv, num_seqs, tk)
    extra = ((cu_kv[1:] - cu_kv[:-1]) - (cu_q[1:] - cu_q[:-1]))[q_seq]
    return q_seq, q_at, extra, k_seq, k_at


def _seen(q_seq, q_pos, k_seq, k_pos, causal, window):
    seen = (q_seq[:, None] == k_seq[None, :]) & (q_seq >= 0)[:, None]
    if causal:
        seen &= k_pos[None, :] <= q_pos[:, None]
    if window is not None:
        left, right = window
        if left is not None:
            seen &= k_pos[None, :] >= q_pos[:, None] - left
        if right is not None:
            seen &= k_pos[None, :] <= q_pos[:, None] + right
    return seen


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q, k, v, tables, config):
    return _fwd(q, k, v, tables, config)[0]


def _fwd(q, k, v, tables, config):
    scale, causal, window = config
    q_seq, q_at, extra, k_seq, k_at = tables
    seen = _seen(q_seq, q_at + extra, k_seq, k_at, causal, window)
    live = seen.any(0)[:, None, None]
    k, v = jnp.where(live, k, 0), jnp.where(live, v, 0)
    q = jnp.where((q_seq >= 0)[:, None, None, None], q, 0)
    x = scale * _dot("tkgh,skh->kgts", q.astype(jnp.float32), k.astype(jnp.float32))
    x = jnp.where(seen, x, -jnp.inf)
    m = x.max(-1)
    m = jnp.where(jnp.isfinite(m), m, 0.0)
    w = jnp.exp(x - m[..., None])
    l = w.sum(-1)
    total = jnp.where(l > 0, l, 1.0)
    out = _dot("kgts,skv->tkgv", w / total[..., None], v.astype(jnp.float32)).astype(q.dtype)
    lse = jnp.where(l > 0, m + jnp.log(total), -jnp.inf)
    return (out, lse), (q, k, v, out, lse, tables)


def _bwd(config, res, cotangents):
    scale, causal, window = config
    q, k, v, out = (x.astype(jnp.float32) for x in res[:4])
    lse, (q_seq, q_at, _, k_seq, k_at) = res[4:]
    do, dlse = cotangents[0].astype(jnp.float32), cotangents[1]
    seen = _seen(q_seq, q_at, k_seq, k_at, causal, window)
    pivot = jnp.where(jnp.isfinite(lse), lse, jnp.inf)
    x = scale * _dot("tkgh,skh->kgts", q, k)
    p = jnp.where(seen, jnp.exp(x - pivot[..., None]), 0.0)
    dp = _dot("tkgv,skv->kgts", do, v)
    delta = _dot("tkgv,tkgv->kgt", do, out) - dlse
    ds = jnp.where(seen, p * (dp - delta[..., None]), 0.0)
    dq = scale * _dot("kgts,skh->tkgh", ds, k)
    dk = scale * _dot("kgts,tkgh->skh", ds, q)
    dv = _dot("kgts,tkgv->skv", p, do)
    return dq.astype(res[0].dtype), dk.astype(res[1].dtype), dv.astype(res[2].dtype), None


_attend.defvjp(_fwd, _bwd)


def attention(q, k, v, *, cu_q_lens, cu_kv_lens, num_seqs, causal=False, window=None, scale=None, save_residuals=False):
    t, n, h = q.shape
    kv = k.shape[1]
    scale = h**-0.5 if scale is None else scale
    tables = _tables(cu_q_lens, cu_kv_lens, num_seqs, t, k.shape[0])
    config = (scale, bool(causal), None if window is None else tuple(window))
    out, lse = _attend(q.reshape(t, kv, n // kv, h), k, v, tables, config)
    out = out.reshape(t, n, v.shape[-1])
    return (out, {"logsumexp": lse.reshape(n, t).T}) if save_residuals else out
