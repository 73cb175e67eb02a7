"""Adapter of the scaled dot product attention of Equimo's tabular models, on one sequence `[heads, length, depth]`.

Products are rounded to the operands' dtype before its softmax, which is in f32
(https://github.com/clementpoiret/Equimo, `equimo/tabular/layers/attention.py`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from equimo.tabular.layers import attention as library

from impls.contract.declarations import declare


@declare(logits="input", group_sums="input")
def attention(q: Any, k: Any, v: Any) -> Any:
    """`_scaled_dot_product_attention`, mapped over the batch."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        return library._scaled_dot_product_attention(q, k, v, q.shape[-1])

    return jnp.swapaxes(jax.vmap(attend)(*(jnp.swapaxes(x, 1, 2) for x in (q, k, v))), 1, 2)
