"""A correct attention function as a user would write it: key blocks with a running softmax, differentiated by JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from conformance import declare
from tests.kernels.naive import allowed_pairs

BLOCK = 64


@declare(behind_mask="finite")
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
    """Blocked attention with an online softmax."""
    group = q.shape[2] // k.shape[2]
    keys = jnp.repeat(k, group, axis=2)
    values = jnp.repeat(v, group, axis=2)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    ok = jnp.broadcast_to(
        allowed_pairs(q, k, causal, window, mask, segment_ids),
        (q.shape[0], q.shape[2], q.shape[1], k.shape[1]),
    )
    shape = (q.shape[0], q.shape[2], q.shape[1], 1)
    m, total = jnp.full(shape, -jnp.inf), jnp.zeros(shape)
    if sinks is not None:
        m = jnp.broadcast_to(jax.lax.stop_gradient(sinks)[:, None, None], shape)
        total = jnp.exp(sinks[:, None, None] - m)
    top = jnp.full(shape, -jnp.inf)
    acc = jnp.zeros((*shape[:3], v.shape[-1]))
    for start in range(0, k.shape[1], BLOCK):
        block = slice(start, start + BLOCK)
        z = scale * jnp.einsum(
            "btnh,bsnh->bnts", q, keys[:, block], precision="highest", preferred_element_type=jnp.float32
        )
        if bias is not None:
            z = z + (bias[..., block] if bias.shape[-1] > 1 else bias)
        if soft_cap is not None:
            z = soft_cap * jnp.tanh(z / soft_cap)
        z = jnp.where(ok[..., block], z, -jnp.inf)
        block_top = jax.lax.stop_gradient(z.max(axis=-1, keepdims=True))
        top = jnp.maximum(top, block_top)
        new_m = jnp.maximum(m, block_top)
        finite = jnp.where(jnp.isfinite(new_m), new_m, 0)
        alpha = jnp.where(jnp.isfinite(m), jnp.exp(m - finite), 0)
        e = jnp.where(ok[..., block], jnp.exp(jnp.where(ok[..., block], z, 0) - finite), 0)
        e = jnp.where(ok[..., block], e, 0)
        total = total * alpha + e.sum(axis=-1, keepdims=True)
        update = jnp.einsum(
            "bnts,bsnv->bntv",
            e.astype(v.dtype),
            values[:, block],
            precision="highest",
            preferred_element_type=jnp.float32,
        )
        acc = acc * alpha + update
        m = new_m
    safe = jnp.where(total == 0, 1, total)
    out = (acc / safe).transpose(0, 2, 1, 3).astype(q.dtype)
    if not save_residuals:
        return out
    lse = jnp.where(total == 0, -jnp.inf, jnp.where(jnp.isfinite(m), m, 0) + jnp.log(safe))
    return out, {"logsumexp": lse[..., 0], "max_logits": top[..., 0]}
