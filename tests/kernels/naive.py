"""A correct attention function as a user would write it: all logits at once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from conformance import declare


def build_mask(q: Any, k: Any, causal: bool, window: Any, mask: Any, segment_ids: Any) -> jax.Array:
    """Return which pairs may attend, as booleans broadcastable to `[B, N, T, S]`."""
    i = jnp.arange(q.shape[1])[:, None]
    j = jnp.arange(k.shape[1])[None, :]
    ok = jnp.ones((1, 1, q.shape[1], k.shape[1]), bool)
    if causal:
        ok &= j <= i
    if window is not None:
        left, right = window
        ok &= (j >= i - left) if left is not None else True
        ok &= (j <= i + right) if right is not None else True
    if mask is not None:
        ok = ok & mask
    if segment_ids is not None:
        q_ids, kv_ids = segment_ids
        ok = ok & (q_ids[:, None, :, None] == kv_ids[:, None, None, :])
    return ok


@declare(behind_mask="finite")
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: Any = None,
    mask: Any = None,
    segment_ids: Any = None,
    soft_cap: Any = None,
    sinks: Any = None,
    bias: Any = None,
    scale: Any = None,
    save_residuals: bool = False,
) -> Any:
    """Compute attention correctly, with memory that grows quadratically."""
    dtype, group = q.dtype, q.shape[2] // k.shape[2]
    # In f32, since the gradient of a repeat is a sum over the group, which bf16 would round at every step.
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    z = scale * jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest", preferred_element_type=jnp.float32)
    if bias is not None:
        z = z + bias
    if soft_cap is not None:
        z = soft_cap * jnp.tanh(z / soft_cap)
    ok = build_mask(q, k, causal, window, mask, segment_ids)
    z = jnp.where(ok, z, -1e30)
    m = z.max(axis=-1, keepdims=True)
    if sinks is not None:
        m = jnp.maximum(m, sinks[:, None, None])
    m = jax.lax.stop_gradient(m)
    e = jnp.where(ok, jnp.exp(z - m), 0)
    total = e.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks[:, None, None] - m)
    total = jnp.where(total == 0, 1, total)
    p = (e / total).astype(dtype)
    out = jnp.einsum("bnts,bsnv->btnv", p, v, precision="highest", preferred_element_type=jnp.float32)
    out = out.astype(dtype)
    if not save_residuals:
        return out
    top = jnp.where(ok, z, -jnp.inf).max(axis=-1)
    return out, {"logsumexp": (m + jnp.log(total))[..., 0], "max_logits": top}
