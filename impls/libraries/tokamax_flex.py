"""Adapter of tokamax's flex attention (OpenXLA), the operator that runs on every platform.

Its functions get all logits, and the shape of the mask, at once. Arrays that they capture are closed over
(https://github.com/openxla/tokamax, `tokamax/_src/ops/flex_attention/base.py`).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from tokamax._src.ops.flex_attention import base

from impls.contract.declarations import declare


def _list_places(shape: tuple[int, ...]) -> Any:
    return jnp.ogrid[tuple(slice(size) for size in shape)]


@declare(
    captures=True,
    empty_rows="mean",
    behind_mask="finite",
    unsupported={"f16": "products of f16 are not supported on a CPU (tokamax 0.0.12)"},
)
def flex(q: Any, k: Any, v: Any, *, mask_mod: Any = None, score_mod: Any = None, scale: Any = None) -> Any:
    """`FlexAttention` of tokamax, without its kernel for GPUs."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale

    def score(logits: Any) -> Any:
        scaled = logits * factor
        return scaled if score_mod is None else score_mod(scaled, *_list_places(logits.shape))

    mask = None if mask_mod is None else lambda shape: mask_mod(*_list_places(shape))
    return base.FlexAttention()(q, k, v, score_mod=score, mask_mod=mask)
