"""Plain masked attention with a large negative number. A row that sees nothing averages all values."""

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST
HIDDEN = -1e30


def visible(q, k, causal=False, window=None, mask=None, segment_ids=None):
    b, t, n, s = q.shape[0], q.shape[1], q.shape[2], k.shape[1]
    at = jnp.arange(t, dtype=jnp.int32)[:, None]
    j = jnp.arange(s, dtype=jnp.int32)[None, :]
    seen = jnp.ones((1, 1, t, s), bool)
    if causal:
        seen &= j <= at
    if window is not None:
        left, right = window
        if left is not None:
            seen &= j >= at - left
        if right is not None:
            seen &= j <= at + right
    if segment_ids is not None:
        ids_q, ids_k = segment_ids
        seen = seen & (ids_q[:, None, :, None] == ids_k[:, None, None, :])
    if mask is not None:
        seen = seen & mask
    return jnp.broadcast_to(seen, (b, n, t, s))


def attention(
    q,
    k,
    v,
    *,
    causal=False,
    window=None,
    mask=None,
    segment_ids=None,
    soft_cap=None,
    bias=None,
    alibi_slopes=None,
    scale=None,
    save_residuals=False,
):
    b, t, n, h = q.shape
    s, heads, d = k.shape[1], k.shape[2], v.shape[-1]
    scale = h**-0.5 if scale is None else scale
    seen = visible(q, k, causal=causal, window=window, mask=mask, segment_ids=segment_ids)
    kf, vf = (jnp.repeat(x.astype(jnp.float32), n // heads, axis=2) for x in (k, v))
    x = jnp.einsum("btnh,bsnh->bnts", q.astype(jnp.float32), kf, precision=HIGHEST) * scale
    if bias is not None:
        x = x + bias.astype(jnp.float32)
    if alibi_slopes is not None:
        distance = jnp.abs(jnp.arange(t)[:, None] + (s - t) - jnp.arange(s)[None, :]).astype(jnp.float32)
        x = x - jax.lax.stop_gradient(alibi_slopes.astype(jnp.float32))[:, None, None] * distance
    x = jnp.where(seen, x, 0)
    if soft_cap is not None:
        x = soft_cap * jnp.tanh(x / soft_cap)
    x = jnp.where(seen, x, HIDDEN)
    empty = ~seen.any(-1, keepdims=True)
    top = jax.lax.stop_gradient(x.max(-1, keepdims=True))
    e = jnp.exp(x - top)
    l = e.sum(-1, keepdims=True)
    p = jnp.where(seen | empty, e / l, 0)
    out = jnp.einsum("bnts,bsnv->btnv", p, vf, precision=HIGHEST).astype(q.dtype)
    if save_residuals:
        return out, {"logsumexp": (top + jnp.log(l))[..., 0], "max_logits": top[..., 0]}
    return out
