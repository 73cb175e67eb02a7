"""Adapter of `taktiny.nn.Attention`, a module whose projections get identity weights.

A mask has no axis of heads. Masked weights are set to zero after the softmax, so that empty rows give zero
(https://github.com/solitariusai/taktiny, `taktiny/nn/modules/transformer.py`).
Its arithmetic is in the operands' dtype.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from taktiny import nn

from impls.contract.declarations import declare

_UNSUPPORTED = {
    **dict.fromkeys(("gqa", "mqa"), "q, k and v have the same number of heads"),
    "v_head_dim": "values have the depth of keys",
    "dense_head": "a mask has no axis of heads",
}


@declare(logits="input", softmax="input", empty_rows="zero", behind_mask="finite", unsupported=_UNSUPPORTED)
def attention(
    q: Any, k: Any, v: Any, *, causal: bool = False, mask: Any = None, bias: Any = None, scale: Any = None
) -> Any:
    """`taktiny.nn.Attention`, cross attention of q to k and v."""
    heads, depth = q.shape[2:]

    def identity(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        del key
        return jnp.eye(heads * depth, dtype=dtype).reshape(shape)

    options = {"scaling": scale, "dtype": q.dtype, "rngs": nn.Rngs(0), "kernel_initializer": identity}
    layer = nn.Attention(heads * depth, heads, bias=False, **options)
    q, k, v = (x.reshape(*x.shape[:2], -1) for x in (q, k, v))
    return layer(q, (k, v), mask, bias, causal).reshape(*q.shape[:2], heads, depth)
