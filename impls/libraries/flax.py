"""Adapters of the attention functions of Flax.

`flax.linen` documents that heads must match. `flax.nnx` calls `jax.nn.dot_product_attention` unless weights are dropped
or sown; then it computes the weights first (https://flax.readthedocs.io/en/latest/api_reference/flax.nnx/nn/attention.html).
"""

from __future__ import annotations

from typing import Any

from flax import linen as flax_linen
from flax import nnx as flax_nnx

from conformance import declare

_EQUAL_HEADS = {"gqa": "q, k and v must have the same number of heads", "mqa": "q, k and v must have the same number"}


@declare(
    logits="input", softmax="input", scaled_q=True, empty_rows="mean", behind_mask="finite", unsupported=_EQUAL_HEADS
)
def linen(q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None) -> Any:
    """`flax.linen.dot_product_attention`: softmax in the dtype of its operands, which is the default."""
    return flax_linen.dot_product_attention(q, k, v, bias=bias, mask=mask)


@declare(empty_rows="mean", behind_mask="finite", unsupported={"v_head_dim": "values have the depth of keys"})
def nnx(q: Any, k: Any, v: Any, *, causal: bool = False, mask: Any = None, bias: Any = None) -> Any:
    """`flax.nnx.dot_product_attention`, which calls `jax.nn.dot_product_attention`."""
    return flax_nnx.dot_product_attention(q, k, v, bias=bias, mask=mask, is_causal=causal)


@declare(logits="input", softmax="input", scaled_q=True, group_sums="input", empty_rows="mean", behind_mask="finite")
def nnx_weights(q: Any, k: Any, v: Any, *, causal: bool = False, mask: Any = None, bias: Any = None) -> Any:
    """`flax.nnx.dot_product_attention` with a dropout rate, in a deterministic call: the weights are computed first."""
    return flax_nnx.dot_product_attention(
        q, k, v, bias=bias, mask=mask, is_causal=causal, dropout_rate=0.1, deterministic=True
    )
