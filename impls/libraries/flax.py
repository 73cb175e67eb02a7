"""Adapters of the attention functions of Flax.

`flax.linen` documents that heads must match. `flax.nnx` calls `jax.nn.dot_product_attention` unless weights are dropped
or sown; then it computes the weights first (https://flax.readthedocs.io/en/latest/api_reference/flax.nnx/nn/attention.html).
The modules are called with identity projections.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import linen as flax_linen
from flax import nnx as flax_nnx

from impls.contract.declarations import declare
from impls.libraries.identity_projections import initialize_identity, merge_heads, split_heads

_EQUAL_HEADS = {"gqa": "q, k and v must have the same number of heads", "mqa": "q, k and v must have the same number"}
_EQUAL_DEPTHS = {"v_head_dim": "values have the depth of keys"}


@declare(
    logits="input",
    softmax="input",
    scaled_q=True,
    empty_rows="mean",
    behind_mask="finite",
    unsupported=_EQUAL_HEADS,
    dropout_shared=("batch", "heads"),
)
def linen(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = None,
    bias: Any = None,
    dropout_rate: float | None = None,
    dropout_key: Any = None,
) -> Any:
    """`flax.linen.dot_product_attention`: softmax in the dtype of its operands, which is the default."""
    dropout = {"dropout_rate": dropout_rate or 0.0, "dropout_rng": dropout_key}
    return flax_linen.dot_product_attention(q, k, v, bias=bias, mask=mask, **dropout)


@declare(logits="input", scaled_q=True, empty_rows="mean", behind_mask="finite", unsupported=_EQUAL_HEADS)
def linen_fp32(q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None) -> Any:
    """`flax.linen.dot_product_attention(force_fp32_for_softmax=True)`: a softmax in f32 of rounded logits."""
    return flax_linen.dot_product_attention(q, k, v, bias=bias, mask=mask, force_fp32_for_softmax=True)


@declare(
    logits="input",
    softmax="input",
    scaled_q=True,
    empty_rows="mean",
    behind_mask="finite",
    unsupported=_EQUAL_HEADS | _EQUAL_DEPTHS,
)
def linen_module(q: Any, k: Any, v: Any, *, mask: Any = None) -> Any:
    """`flax.linen.MultiHeadDotProductAttention` with identity projections."""
    module = flax_linen.MultiHeadDotProductAttention(
        num_heads=q.shape[2], param_dtype=q.dtype, use_bias=False, kernel_init=initialize_identity, precision="highest"
    )
    inputs = [merge_heads(x) for x in (q, k, v)]
    out, _ = module.init_with_output(jax.random.key(0), *inputs, mask=mask)
    return split_heads(out, q.shape[2])


@declare(empty_rows="mean", behind_mask="finite", unsupported=_EQUAL_DEPTHS)
def nnx(q: Any, k: Any, v: Any, *, causal: bool = False, mask: Any = None, bias: Any = None) -> Any:
    """`flax.nnx.dot_product_attention`, which calls `jax.nn.dot_product_attention`."""
    return flax_nnx.dot_product_attention(q, k, v, bias=bias, mask=mask, is_causal=causal)


@declare(
    logits="input",
    softmax="input",
    scaled_q=True,
    group_sums="input",
    empty_rows="mean",
    behind_mask="finite",
    dropout_shared=("batch", "heads"),
)
def nnx_weights(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    mask: Any = None,
    bias: Any = None,
    dropout_rate: float | None = None,
    dropout_key: Any = None,
) -> Any:
    """`flax.nnx.dot_product_attention` with a dropout rate, so that weights are computed first."""
    return flax_nnx.dot_product_attention(
        q,
        k,
        v,
        bias=bias,
        mask=mask,
        is_causal=causal,
        dropout_rate=dropout_rate or 0.1,
        dropout_rng=dropout_key,
        deterministic=not dropout_rate,
    )


@declare(empty_rows="mean", behind_mask="finite", unsupported=_EQUAL_DEPTHS)
def nnx_module(q: Any, k: Any, v: Any, *, causal: bool = False, mask: Any = None) -> Any:
    """`flax.nnx.MultiHeadAttention` with identity projections."""
    num_heads, num_kv_heads = q.shape[2], k.shape[2]
    module = flax_nnx.MultiHeadAttention(
        num_heads=num_heads,
        in_features=num_heads * q.shape[3],
        num_kv_heads=num_kv_heads,
        in_kv_features=num_kv_heads * k.shape[3],
        param_dtype=q.dtype,
        use_bias=False,
        kernel_init=initialize_identity,
        precision="highest",
        decode=False,
        rngs=flax_nnx.Rngs(0),
    )
    inputs = [merge_heads(x) for x in (q, k, v)]
    return split_heads(module(*inputs, mask=mask, is_causal=causal), num_heads)
