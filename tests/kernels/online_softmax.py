"""A correct attention function as a user would write it: an online softmax in a scan over key blocks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from conformance import declare
from tests.kernels.naive import build_mask

BLOCK = 64


def _split_blocks(x: Any, length: Any) -> Any:
    """Split the last axis into blocks and move them to the front: `[blocks, ..., BLOCK]`."""
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -length % BLOCK)])
    return jnp.moveaxis(x.reshape(*x.shape[:-1], -1, BLOCK), -2, 0)


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
    """Compute attention block by block with an online softmax, differentiated by JAX."""
    dtype, group, kv_length = q.dtype, q.shape[2] // k.shape[2], k.shape[1]
    # In f32, since JAX sums gradients over blocks (dq) and over the group (dk, dv) in the dtype of the operands.
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    shape = (q.shape[0], q.shape[2], q.shape[1])
    ok = jnp.broadcast_to(build_mask(q, k, causal, window, mask, segment_ids), (*shape, kv_length))
    bias = jnp.zeros((1, 1, 1, kv_length)) if bias is None else bias
    heads_first = lambda x: jnp.repeat(x, group, axis=2).transpose(0, 2, 3, 1)  # noqa: E731 -- [B, N, depth, S]
    blocks = tuple(_split_blocks(x, kv_length) for x in (heads_first(k), heads_first(v), ok, bias))

    def step(carry: Any, block: Any) -> Any:
        m, total, acc = carry
        keys, values, seen, extra = block
        z = jnp.einsum("btnh,bnhs->bnts", q, keys, precision="highest", preferred_element_type=jnp.float32)
        z = scale * z + extra
        if soft_cap is not None:
            z = soft_cap * jnp.tanh(z / soft_cap)
        new_m = jnp.maximum(m, jax.lax.stop_gradient(jnp.where(seen, z, -jnp.inf).max(axis=-1)))
        pivot = jnp.where(jnp.isfinite(new_m), new_m, 0)[..., None]
        alpha = jnp.where(jnp.isfinite(m), jnp.exp(m - pivot[..., 0]), 0)
        e = jnp.where(seen, jnp.exp(jnp.where(seen, z - pivot, 0)), 0)
        update = jnp.einsum(
            "bnts,bnvs->bntv", e.astype(dtype), values, precision="highest", preferred_element_type=jnp.float32
        )
        return (new_m, total * alpha + e.sum(axis=-1), acc * alpha[..., None] + update), None

    start = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, v.shape[-1])))
    (top, total, acc), _ = jax.lax.scan(step, start, blocks)
    m = top
    if sinks is not None:
        m = jnp.maximum(top, jax.lax.stop_gradient(sinks)[:, None])
        alpha = jnp.where(jnp.isfinite(top), jnp.exp(top - m), 0)
        total, acc = total * alpha + jnp.exp(sinks[:, None] - m), acc * alpha[..., None]
    safe = jnp.where(total == 0, 1, total)
    out = (acc / safe[..., None]).transpose(0, 2, 1, 3).astype(dtype)
    if not save_residuals:
        return out
    lse = jnp.where(total == 0, -jnp.inf, jnp.where(jnp.isfinite(m), m, 0) + jnp.log(safe))
    return out, {"logsumexp": lse, "max_logits": top}
