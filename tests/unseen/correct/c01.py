"""Two-pass softmax over the full logits, differentiated by JAX."""

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


def _visible(q, k, causal, window, mask, segment_ids):
    t, s = q.shape[1], k.shape[1]
    i = jnp.arange(t, dtype=jnp.int32)[:, None]
    j = jnp.arange(s, dtype=jnp.int32)[None, :]
    seen = jnp.ones((1, 1, t, s), bool)
    if causal:
        seen = seen & (j <= i)
    if window is not None:
        left, right = window
        if left is not None:
            seen = seen & (j >= i - left)
        if right is not None:
            seen = seen & (j - i <= right)
    if mask is not None:
        seen = seen & mask
    if segment_ids is not None:
        qs, ks = segment_ids
        seen = seen & (qs[:, None, :, None] == ks[:, None, None, :])
    return seen


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
    sinks=None,
    bias=None,
    scale=None,
    save_residuals=False,
):
    b, t, n, h = q.shape
    s, heads = k.shape[1], k.shape[2]
    g = n // heads
    scale = h**-0.5 if scale is None else scale
    seen = jnp.broadcast_to(_visible(q, k, causal, window, mask, segment_ids), (b, n, t, s))
    live = seen.reshape(b, heads, g, t, s).any((2, 3)).swapaxes(1, 2)[..., None]
    qf = q.astype(jnp.float32)
    kf = jnp.where(live, k, 0).astype(jnp.float32)
    vf = jnp.where(live, v, 0).astype(jnp.float32)

    x = jnp.einsum("btkgh,bskh->bkgts", qf.reshape(b, t, heads, g, h), kf, precision=HIGHEST)
    x = x.reshape(b, n, t, s) * scale
    if bias is not None:
        x = x + bias.astype(jnp.float32)
    x = jnp.where(seen, x, 0)
    if soft_cap is not None:
        x = soft_cap * jnp.tanh(x / soft_cap)
    x = jnp.where(seen, x, -jnp.inf)

    top = jax.lax.stop_gradient(x.max(-1, keepdims=True))
    pivot = top
    if sinks is not None:
        sink = sinks.astype(jnp.float32)[None, :, None, None]
        pivot = jnp.maximum(top, jax.lax.stop_gradient(sink))
    safe = jnp.where(pivot == -jnp.inf, 0, pivot)
    total = jnp.exp(x - safe).sum(-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - safe)
    empty = total == 0
    log_total = jnp.log(jnp.where(empty, 1, total))
    lse = jnp.where(empty, -jnp.inf, safe + log_total)
    p = jnp.where(seen, jnp.exp(x - safe) / jnp.where(empty, 1, total), 0)
    out = jnp.einsum("bkgts,bskv->btkgv", p.reshape(b, heads, g, t, s), vf, precision=HIGHEST)
    out = out.reshape(b, t, n, v.shape[-1]).astype(q.dtype)
    if save_residuals:
        return out, {"logsumexp": lse[..., 0], "max_logits": top[..., 0]}
    return out
