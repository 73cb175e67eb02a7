"""Softmax with a pivot from norms: |q| times the largest |k| that the row sees bounds its logits."""

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST
NEAR = 12.0


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


def clear(x, seen):
    """Zero rows of keys or values that no query of their group sees, in float32."""
    b, n, t, s = seen.shape
    live = seen.reshape(b, x.shape[2], -1, s).any(2)
    return jnp.where(live.swapaxes(1, 2)[..., None], x, 0).astype(jnp.float32)


def attention(
    q, k, v, *, causal=False, window=None, mask=None, segment_ids=None, soft_cap=None, scale=None, save_residuals=False
):
    b, t, n, h = q.shape
    s, heads, d = k.shape[1], k.shape[2], v.shape[-1]
    g = n // heads
    scale = h**-0.5 if scale is None else scale
    seen = visible(q, k, causal=causal, window=window, mask=mask, segment_ids=segment_ids)
    ok = seen.reshape(b, heads, g, t, s)
    kf, vf = clear(k, seen), clear(v, seen)
    qf = q.astype(jnp.float32).reshape(b, t, heads, g, h)
    x = scale * jnp.einsum("btkgh,bskh->bkgts", qf, kf, precision=HIGHEST)
    x = jnp.where(ok, x, 0)
    sq, sk = jax.lax.stop_gradient((qf, kf))
    norm_q = jnp.moveaxis(jnp.sqrt((sq * sq).sum(-1)), 1, -1)
    norm_k = jnp.sqrt((sk * sk).sum(-1)).swapaxes(1, 2)[:, :, None, None, :]
    bound = scale * norm_q * jnp.where(ok, norm_k, 0).max(-1)
    if soft_cap is not None:
        x = soft_cap * jnp.tanh(x / soft_cap)
        bound = soft_cap * jnp.tanh(bound / soft_cap)
    x = jnp.where(ok, x, -jnp.inf)
    top = jax.lax.stop_gradient(x.max(-1))
    pivot = jnp.where(jnp.abs(bound - top) <= NEAR, bound, jnp.where(top == -jnp.inf, 0, top))
    e = jnp.where(ok, jnp.exp(x - pivot[..., None]), 0)
    l = e.sum(-1)
    empty = l == 0
    l = jnp.where(empty, 1, l)
    out = jnp.einsum("bkgts,bskv->bkgtv", e, vf, precision=HIGHEST) / l[..., None]
    out = jnp.moveaxis(out, 3, 1).reshape(b, t, n, d).astype(q.dtype)
    if save_residuals:
        lse = jnp.where(empty, -jnp.inf, pivot + jnp.log(l))
        return out, {"logsumexp": lse.reshape(b, n, t), "max_logits": top.reshape(b, n, t)}
    return out
