"""Adapter of `flash_dot_product_attention` of Artifex, which calls Flax where cuDNN does not serve the call.

Causal attention needs equal lengths, or a single query, which then sees all keys
(https://github.com/avitai/artifex, `artifex/generative_models/core/layers/flash_attention.py`).
"""

from __future__ import annotations

from typing import Any

from artifex.generative_models.core.layers.flash_attention import flash_dot_product_attention as library_call

from impls.contract.declarations import declare


@declare(
    scaled_q=True, empty_rows="mean", behind_mask="finite", unsupported={"v_head_dim": "values have the depth of keys"}
)
def flash_dot_product_attention(
    q: Any, k: Any, v: Any, *, causal: bool = False, mask: Any = None, bias: Any = None, scale: Any = None
) -> Any:
    """`flash_dot_product_attention`, in a deterministic call."""
    if causal and q.shape[1] != k.shape[1]:
        raise NotImplementedError("causal attention has equal lengths")
    return library_call(q, k, v, bias, mask, is_causal=causal, scale=scale, deterministic=True)
