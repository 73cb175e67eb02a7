"""Adapter of `haiku.MultiHeadAttention`, a module with projections.

Logits, softmax and probabilities have the dtype of its inputs: nothing in it casts
(https://dm-haiku.readthedocs.io/en/latest/api.html#multiheadattention).
"""

from __future__ import annotations

from typing import Any

import haiku
import jax

from impls.contract.declarations import declare
from impls.libraries.identity_projections import initialize_identity, merge_heads, split_heads


@declare(
    logits="input",
    softmax="input",
    empty_rows="mean",
    behind_mask="finite",
    unsupported={"gqa": "it has one number of heads", "mqa": "it has one number of heads"},
)
def multi_head_attention(q: Any, k: Any, v: Any, *, mask: Any = None) -> Any:
    """`haiku.MultiHeadAttention` with identity projections."""
    num_heads, value_size = q.shape[2], v.shape[3]

    def apply(*inputs: Any) -> Any:
        module = haiku.MultiHeadAttention(
            num_heads,
            key_size=q.shape[3],
            value_size=value_size,
            model_size=num_heads * value_size,
            w_init=lambda shape, dtype: initialize_identity(None, shape, dtype),
            with_bias=False,
        )
        return module(*inputs)

    inputs = [merge_heads(x) for x in (q, k, v)]
    transformed = haiku.transform(apply)
    with jax.default_matmul_precision("highest"):
        out = transformed.apply(transformed.init(jax.random.key(0), *inputs, mask), None, *inputs, mask)
    return split_heads(out, num_heads)
