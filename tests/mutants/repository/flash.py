"""A flash-attention function with usual conventions, as the weak tests beside it have it."""

import functools

import jax
import jax.numpy as jnp

BLOCK = 32


@functools.partial(jax.jit, static_argnames=("is_causal", "window_size", "softcap", "return_lse"))
def flash_attention(
    query,
    key,
    value,
    attn_mask=None,
    *,
    is_causal=False,
    window_size=(-1, -1),
    softmax_scale=None,
    softcap=0.0,
    sinks=None,
    return_lse=False,
):
    """Attention over blocks of keys; `query [B, T, N, H]`; the last query is aligned with the last key."""
    batch, q_length, heads, depth = query.shape
    kv_length, kv_heads = key.shape[1:3]
    scale = depth**-0.5 if softmax_scale is None else softmax_scale
    q = query.astype(jnp.float32).reshape(batch, q_length, kv_heads, heads // kv_heads, depth)
    place = jnp.arange(q_length)[:, None] + kv_length - q_length
    top = jnp.full((batch, kv_heads, heads // kv_heads, q_length), -1e30)
    total = jnp.zeros_like(top)
    acc = jnp.zeros((*top.shape, value.shape[-1]))
    for start in range(0, kv_length, BLOCK):
        k, v = (x[:, start : start + BLOCK].astype(jnp.float32) for x in (key, value))
        keys = start + jnp.arange(k.shape[1])
        x = jnp.einsum("btkgh,bskh->bkgts", q, k, precision="highest") * scale
        if softcap:
            x = softcap * jnp.tanh(x / softcap)
        ok = jnp.ones((q_length, k.shape[1]), bool)
        if is_causal:
            ok &= keys <= place
        if window_size[0] >= 0:
            ok &= keys >= place - window_size[0]
        if window_size[1] >= 0:
            ok &= keys <= place + window_size[1]
        ok = ok[None, None, None]
        if attn_mask is not None:
            ok = ok & attn_mask[:, :, None, :, start : start + BLOCK]
        x = jnp.where(ok, x, -jnp.inf)
        new = jnp.maximum(top, x.max(axis=-1))
        weights = jnp.exp(x - new[..., None])
        alpha = jnp.exp(top - new)
        total = total * alpha + weights.sum(axis=-1)
        acc = acc * alpha[..., None] + jnp.einsum("bkgts,bskv->bkgtv", weights, v, precision="highest")
        top = new
    if sinks is not None:
        total = total + jnp.exp(sinks.reshape(kv_heads, -1)[:, :, None] - top)
    out = acc / jnp.where(total == 0, 1.0, total)[..., None]
    out = out.transpose(0, 3, 1, 2, 4).reshape(batch, q_length, heads, -1).astype(query.dtype)
    if not return_lse:
        return out
    lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(jnp.where(total == 0, 1.0, total)))
    return out, lse.reshape(batch, heads, q_length)
