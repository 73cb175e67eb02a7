"""Adapter of the attention function of eqx-zoo, on one sequence `[length, heads, depth]`.

It always takes a mask, and as many key heads as query heads: `eqx_zoo.layers.attention.Attention` repeats shared ones
(https://github.com/xquantize/eqx-zoo). Logits are rounded to the operands' dtype before its softmax, which is in f32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from eqx_zoo.layers import attention as library

from impls.contract.declarations import declare

_EQUAL = "q, k and v have the same number of heads"


@declare(
    logits="input",
    empty_rows="mean",
    behind_mask="finite",
    unsupported={"gqa": _EQUAL, "mqa": _EQUAL},
)
def dot_product_attention(q: Any, k: Any, v: Any, *, mask: Any = None) -> Any:
    """`eqx_zoo.layers.attention.dot_product_attention`, mapped over the batch."""
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    pairs = jnp.broadcast_to(True if mask is None else mask, shape)

    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return library.dot_product_attention(q[:, None], k[:, None], v[:, None], mask)[:, 0]

    one_head = jax.vmap(attend, in_axes=(1, 1, 1, 0), out_axes=1)  # a mask of the library is the same for all heads
    return jax.vmap(one_head)(q, k, v, pairs)
