"""Adapter of the fused attention of Transformer Engine for JAX, which calls cuDNN.

It needs an NVIDIA GPU. It is written from the documentation and was never run
(https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/jax.html). Operands for which cuDNN has no
kernel raise. The bias and the sinks have the dtypes that the library's `DotProductAttention` gives them. Its packed
layouts, which have segment ids, are not called here.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from transformer_engine.jax import attention as library

from impls.contract.declarations import declare

_MASKS = {
    (False, False): "NO_MASK",
    (True, False): "CAUSAL_MASK",
    (False, True): "PADDING_MASK",
    (True, True): "PADDING_CAUSAL_MASK",
}


@declare(
    behind_mask="finite",
    open_sides=-1,
    # Kernels without a fixed order of sums are allowed unless NVTE_ALLOW_NONDETERMINISTIC_ALGO is 0.
    unordered_sums=("dq", "dk", "dv", "dsinks", "dbias"),
    unsupported={"f32": "cuDNN's fused attention takes bf16 and f16 operands only"},
)
def fused(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: Any = None,
    kv_lengths: Any = None,
    sinks: Any = None,
    bias: Any = None,
    scale: Any = None,
) -> Any:
    """`transformer_engine.jax.attention.fused_attn` for sequences that are padded at their ends."""
    batch, q_length, heads, depth = q.shape
    kv_length = k.shape[1]
    lengths = jnp.full(batch, kv_length, jnp.int32) if kv_lengths is None else kv_lengths
    post_bias = None if bias is None else jnp.broadcast_to(bias, (*bias.shape[:1], heads, q_length, kv_length))
    return library.fused_attn(
        (q, k, v),
        None if post_bias is None else post_bias.astype(q.dtype),
        library.SequenceDescriptor.from_seqlens((jnp.full(batch, q_length, jnp.int32), lengths)),
        None,
        attn_bias_type=library.AttnBiasType["NO_BIAS" if bias is None else "POST_SCALE_BIAS"],
        attn_mask_type=library.AttnMaskType[_MASKS[bool(causal), kv_lengths is not None]],
        qkv_layout=library.QKVLayout.BSHD_BSHD_BSHD,
        softmax_type=library.AttnSoftmaxType["VANILLA_SOFTMAX" if sinks is None else "LEARNABLE_SOFTMAX"],
        scaling_factor=depth**-0.5 if scale is None else scale,
        dropout_probability=0.0,
        is_training=True,
        window_size=window,
        softmax_offset=None if sinks is None else sinks.astype(jnp.float32).reshape(1, heads, 1, 1),
    )
