"""The sink as key 0: its logit is given, and its value is zero."""

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


def visible(q, k, causal=False, window=None, mask=None, kv_lengths=None, shift=0):
    b, t, n, s = q.shape[0], q.shape[1], q.shape[2], k.shape[1]
    at = jnp.arange(t, dtype=jnp.int32)[:, None] + shift
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
    if kv_lengths is not None:
        seen = seen & (j < kv_lengths[:, None, None, None])
    if mask is not None:
        seen = seen & mask
    return jnp.broadcast_to(seen, (b, n, t, s))


def clear(x, seen):
    """Zero rows of keys or values that no query of their group sees, in float32."""
    b, n, t, s = seen.shape
    live = seen.reshape(b, x.shape[2], -1, s).any(2)
    return jnp.where(live.swapaxes(1, 2)[..., None], x, 0).astype(jnp.float32)


def attention(
    q,
    k,
    v,
    *,
    causal=False,
    window=None,
    kv_lengths=None,
    mask=None,
    soft_cap=None,
    sinks=None,
    bias=None,
    alibi_slopes=None,
    logit_scale=None,
    scale=None,
    save_residuals=False,
):
    b, t, n, h = q.shape
    s, heads, d = k.shape[1], k.shape[2], v.shape[-1]
    scale = h**-0.5 if scale is None else scale
    seen = visible(q, k, causal=causal, window=window, kv_lengths=kv_lengths, mask=mask, shift=s - t)
    kf, vf = (jnp.repeat(clear(x, seen), n // heads, axis=2) for x in (k, v))
    x = jnp.einsum("btnh,bsnh->bnts", q.astype(jnp.float32), kf, precision=HIGHEST) * scale
    if logit_scale is not None:
        x = x * logit_scale.astype(jnp.float32)[:, None, None]
    if bias is not None:
        x = x + bias.astype(jnp.float32)
    if alibi_slopes is not None:
        place = jnp.arange(t, dtype=jnp.int32)[:, None] + (s - t)
        distance = jnp.abs(place - jnp.arange(s, dtype=jnp.int32)).astype(jnp.float32)
        x = x - jax.lax.stop_gradient(alibi_slopes.astype(jnp.float32))[:, None, None] * distance
    x = jnp.where(seen, x, 0)
    if soft_cap is not None:
        x = soft_cap * jnp.tanh(x / soft_cap)
    x = jnp.where(seen, x, -jnp.inf)
    top = jax.lax.stop_gradient(x.max(-1))
    first = jnp.full((n,), -jnp.inf, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    x = jnp.concatenate([jnp.broadcast_to(first[None, :, None, None], (b, n, t, 1)), x], axis=-1)
    vf = jnp.pad(vf, ((0, 0), (1, 0), (0, 0), (0, 0)))
    m = jax.lax.stop_gradient(x.max(-1, keepdims=True))
    m = jnp.where(m == -jnp.inf, 0, m)
    e = jnp.exp(x - m)
    l = e.sum(-1, keepdims=True)
    empty = l == 0
    l = jnp.where(empty, 1, l)
    p = e / l
    p = jnp.where(jnp.pad(seen, ((0, 0),) * 3 + ((1, 0),)), p, 0)
    out = jnp.einsum("bnts,bsnv->btnv", p, vf, precision=HIGHEST).astype(q.dtype)
    if save_residuals:
        return out, {"logsumexp": jnp.where(empty, -jnp.inf, m + jnp.log(l))[..., 0], "max_logits": top}
    return out
