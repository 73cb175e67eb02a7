"""Adapter of `equinox.nn.MultiheadAttention`, which takes one sequence, so it is mapped over the batch.

Its mask is `[T, S]` or `[N, T, S]` (https://docs.kidger.site/equinox/api/nn/attention/). Logits are rounded to the
operands' dtype, and the softmax is in f32.
"""

from __future__ import annotations

from typing import Any

import equinox
import jax
import jax.numpy as jnp

from impls.contract.declarations import declare
from impls.libraries.identity_projections import initialize_identity, merge_heads, split_heads


@declare(
    logits="input",
    scaled_q=True,
    empty_rows="mean",
    behind_mask="finite",
    unsupported={"gqa": "it has one number of heads", "mqa": "it has one number of heads"},
)
def multihead_attention(
    q: Any, k: Any, v: Any, *, mask: Any = None, dropout_rate: float | None = None, dropout_key: Any = None
) -> Any:
    """`equinox.nn.MultiheadAttention` with identity projections, mapped over the batch."""
    num_heads, size, value_size = q.shape[2], q.shape[2] * q.shape[3], v.shape[2] * v.shape[3]
    module = equinox.nn.MultiheadAttention(
        num_heads,
        query_size=size,
        value_size=value_size,
        output_size=value_size,
        qk_size=q.shape[3],
        vo_size=v.shape[3],
        dropout_p=dropout_rate or 0.0,
        dtype=q.dtype,
        key=jax.random.key(0),
    )
    weights = [getattr(module, name).weight for name in ("query_proj", "key_proj", "value_proj", "output_proj")]
    module = equinox.tree_at(
        lambda m: [m.query_proj.weight, m.key_proj.weight, m.value_proj.weight, m.output_proj.weight],
        module,
        [initialize_identity(None, weight.shape, weight.dtype) for weight in weights],
    )
    if mask is not None:
        mask = jnp.broadcast_to(mask, (q.shape[0], num_heads, q.shape[1], k.shape[1]))
    keys = None if dropout_key is None else jax.random.split(dropout_key, q.shape[0])
    with jax.default_matmul_precision("highest"):
        out = jax.vmap(lambda q, k, v, mask, key: module(q, k, v, mask, key=key))(
            merge_heads(q), merge_heads(k), merge_heads(v), mask, keys
        )
    return split_heads(out, num_heads)
