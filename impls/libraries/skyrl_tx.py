"""Adapter of `tx.layers.attention.dot_product_attention` of SkyRL tx, which calls `jax.nn.dot_product_attention`.

Its mask is one of keys, `[B, S]`, and must keep the first ones (https://github.com/NovaSky-AI/SkyRL/tree/main/skyrl-tx).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from tx.layers.attention import dot_product_attention as library_call

from impls.contract.declarations import declare


@declare(behind_mask="finite", unsupported={"v_head_dim": "values have the depth of keys"})
def dot_product_attention(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
    """`tx.layers.attention.dot_product_attention`, with a mask that keeps all keys."""
    return library_call(q, k, v, jnp.ones(k.shape[:2], jnp.int32), causal, q.shape[3])
