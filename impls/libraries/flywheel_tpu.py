"""Adapter of `flash_attn_func` of FlyWheel, a Pallas kernel for TPUs, in Pallas' interpreter for TPUs.

The layout is `[B, N, T, H]` and the dtype bf16. The last query is aligned with the last key, and empty rows give zero
and a logsumexp of -inf. Queries are multiplied by the scale and log2(e), and rounded. Windows and soft caps have no
gradients (https://github.com/heavyball-research/flywheel-tpu).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flywheel_tpu import flash_attn_func

from impls.contract.declarations import declare

_BF16 = dict.fromkeys(("f32", "f16"), "operands are bf16")


def _call(q: Any, k: Any, v: Any, causal: bool, window: Any, soft_cap: Any, scale: Any, save_residuals: bool) -> Any:
    if k.shape[1] % 128 and not causal and (window is None or window[1] != 0):
        raise NotImplementedError("the number of keys is a multiple of 128 unless the mask is causal")
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    sides = (-1, -1) if window is None else tuple(-1 if side is None else side for side in window)
    options = {"softmax_scale": scale, "causal": causal, "window_size": sides, "softcap": soft_cap or 0.0}
    result = flash_attn_func(q, k, v, return_softmax_lse=save_residuals, interpret=True, **options)
    if not save_residuals:
        return jnp.swapaxes(result, 1, 2)
    return jnp.swapaxes(result[0], 1, 2), {"logsumexp": result[1]}


@declare(
    behind_mask="finite",
    scaled_q="base2",
    causal="end",
    empty_rows="zero",
    differentiable_residuals=False,
    unsupported=_BF16,
)
def flash_attn_func_training(
    q: Any, k: Any, v: Any, *, causal: bool = False, scale: Any = None, save_residuals: bool = False
) -> Any:
    """`flash_attn_func` without a window and a soft cap, which has gradients."""
    return _call(q, k, v, causal, None, None, scale, save_residuals)


@declare(
    behind_mask="finite",
    scaled_q="base2",
    causal="end",
    empty_rows="zero",
    differentiable_residuals=False,
    unsupported={**_BF16, "train": "windows and soft caps are forward only"},
)
def flash_attn_func_inference(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: Any = None,
    soft_cap: Any = None,
    scale: Any = None,
    save_residuals: bool = False,
) -> Any:
    """`flash_attn_func` with windows and soft caps, which have no gradients."""
    return _call(q, k, v, causal, window, soft_cap, scale, save_residuals)
