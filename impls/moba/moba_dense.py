"""Mixture of block attention (MoBA) with all logits in memory.

The selected chunks become booleans over all pairs of query and key, which mask plain dot-product attention.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from cases.masks import Mask
from cases.moba_mask import Moba
from impls.dot_product.attention import attend
from impls.explicit_sharding import accept_explicit_sharding
from impls.moba.moba_plan import validate_moba


@accept_explicit_sharding
def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    *,
    mask: Mask,
    segment_ids: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    scale: float | None = None,
    save_residuals: bool = False,
) -> Any:
    """Compute mixture of block attention (Lu et al. 2025, arXiv:2502.13189) with all logits in memory.

    Arguments, results and errors are those of `impls.moba.attention`.
    """
    moba = validate_moba(
        q, k, v, mask=mask, segment_ids=segment_ids, soft_cap=soft_cap, sinks=sinks, bias=bias, scale=scale
    )
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    return attend(
        q,
        k,
        v,
        allowed=compute_allowed_pairs(moba, q, k),
        soft_cap=soft_cap,
        sinks=sinks,
        bias=bias,
        scale=scale,
        save_residuals=save_residuals,
    )


def compute_allowed_pairs(moba: Moba, q: jax.Array, k: jax.Array) -> jax.Array:
    """Compute which pairs may attend, `[B, K, G, T, S]`, for `q [B, T, N, H]` and `k [B, S, K, H]`; no gradients."""
    q, k = (lax.stop_gradient(x).astype(jnp.float32) for x in (q, k))
    batch, q_length, _, depth = q.shape
    kv_length, num_kv_heads = k.shape[1:3]
    q = q.reshape(batch, q_length, num_kv_heads, -1, depth)
    chunks = moba.count_chunks(kv_length)
    position = jnp.arange(q_length) + moba.offset
    own = (position // moba.chunk)[:, None] == jnp.arange(chunks)  # [T, C]
    earlier = jnp.arange(chunks) < (position // moba.chunk)[:, None]

    def gate(mean: jax.Array) -> jax.Array:
        return jnp.einsum("btkgh,bkh->bkgt", q, mean, precision=lax.Precision.HIGHEST)

    # One product per chunk, so that equal chunks tie exactly: in a single product over all chunks the last bit of a
    # gate depends on its column.
    gates = jnp.moveaxis(lax.map(gate, jnp.moveaxis(compute_chunk_means(k, moba.chunk), 1, 0)), 0, -1)
    gates = jnp.where(earlier, gates, -jnp.inf)
    # Rank of each chunk among the gates, highest first. A stable sort keeps ties in the order of their index.
    places = jnp.argsort(jnp.argsort(-gates, axis=-1, stable=True), axis=-1, stable=True)
    taken = own | (earlier & (places < moba.topk - 1))  # [B, K, G, T, C]

    by_key = jnp.repeat(taken, moba.chunk, axis=-1)[..., :kv_length]
    return by_key & (jnp.arange(kv_length) <= position[:, None])


def compute_chunk_means(k: jax.Array, chunk: int) -> jax.Array:
    """Compute the mean key of each chunk, f32 `[B, C, K, H]`; the last chunk may have fewer keys."""
    padded = jnp.pad(k.astype(jnp.float32), ((0, 0), (0, -k.shape[1] % chunk), (0, 0), (0, 0)))
    pieces = padded.reshape(k.shape[0], -1, chunk, *k.shape[2:])
    counts = jnp.minimum(chunk, k.shape[1] - chunk * jnp.arange(pieces.shape[1]))
    return pieces.sum(axis=2) / counts[:, None, None]
