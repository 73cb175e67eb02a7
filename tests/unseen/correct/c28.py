"""Ring buffer: slot r of a row holds the last token p with p % slots == r."""

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


def softmax_sum(x, ok, v, sinks, contract):
    """Weighted values, logsumexp and largest logit. `x` is [..., N, T, S]; `sinks` is [N] or None."""
    x = jnp.where(ok, x, -jnp.inf)
    top = x.max(-1)
    pivot = top if sinks is None else jnp.maximum(top, sinks.astype(jnp.float32)[:, None])
    pivot = jnp.where(pivot == -jnp.inf, 0, pivot)
    e = jnp.exp(x - pivot[..., None])
    l = e.sum(-1)
    if sinks is not None:
        l = l + jnp.exp(sinks.astype(jnp.float32)[:, None] - pivot)
    empty = l == 0
    l = jnp.where(empty, 1, l)
    return contract(e / l[..., None], v), jnp.where(empty, -jnp.inf, pivot + jnp.log(l)), top


def attention(
    q, k_cache, v_cache, *, cache_seqlens, window=None, soft_cap=None, sinks=None, scale=None, save_residuals=False
):
    b, t, n, h = q.shape
    heads, slots, d = v_cache.shape[1:]
    g = n // heads
    scale = h**-0.5 if scale is None else scale
    last = cache_seqlens.astype(jnp.int32)[:, None] - 1
    token = last - (last - jnp.arange(slots, dtype=jnp.int32)) % slots
    at = (last + 1 - t + jnp.arange(t, dtype=jnp.int32))[:, :, None]
    token = token[:, None, :]
    ok = (token >= 0) & (token <= at)
    if window is not None and window[0] is not None:
        ok &= token >= at - window[0]
    live = ok.any(1)[:, None, :, None]
    k, v = (jnp.where(live, x, 0).astype(jnp.float32) for x in (k_cache, v_cache))
    x = jnp.einsum("btkgh,bksh->bkgts", q.astype(jnp.float32).reshape(b, t, heads, g, h), k, precision=HIGHEST) * scale
    if soft_cap is not None:
        x = soft_cap * jnp.tanh(x / soft_cap)
    contract = lambda p, v: jnp.einsum("bkgts,bksv->btkgv", p.reshape(b, heads, g, t, slots), v, precision=HIGHEST)
    out, lse, top = softmax_sum(x.reshape(b, n, t, slots), ok[:, None], v, sinks, contract)
    out = out.reshape(b, t, n, d).astype(q.dtype)
    return (out, {"logsumexp": lse, "max_logits": top}) if save_residuals else out
