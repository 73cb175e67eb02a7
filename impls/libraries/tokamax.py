"""Adapters of `tokamax.dot_product_attention` with the implementations that run on every platform.

Its documentation extends that of `jax.nn.dot_product_attention` by a soft cap after the bias, and by values of another
depth (https://github.com/openxla/tokamax, `tokamax/_src/ops/attention/api.py`). Its kernels for TPUs and GPUs are
judged as `tokamax_splash_tpu` and `tokamax_mosaic_gpu`.
"""

from __future__ import annotations

from typing import Any

import tokamax as library

from impls.contract.declarations import declare


def _call(implementation: str, q: Any, k: Any, v: Any, window: Any, **options: Any) -> Any:
    return library.dot_product_attention(q, k, v, local_window_size=window, implementation=implementation, **options)


@declare(empty_rows="mean", behind_mask="finite", open_sides="length")
def xla(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: Any = None,
    mask: Any = None,
    soft_cap: Any = None,
    bias: Any = None,
    scale: Any = None,
) -> Any:
    """`tokamax.dot_product_attention(implementation="xla")`."""
    options = {"mask": mask, "bias": bias, "scale": scale, "is_causal": causal, "logits_soft_cap": soft_cap}
    return _call("xla", q, k, v, window, **options)


@declare(empty_rows="mean", behind_mask="finite", open_sides="length")
def xla_chunked(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: Any = None,
    mask: Any = None,
    soft_cap: Any = None,
    bias: Any = None,
    scale: Any = None,
) -> Any:
    """`tokamax.dot_product_attention(implementation="xla_chunked")`, in blocks of 512 queries and 1024 keys."""
    options = {"mask": mask, "bias": bias, "scale": scale, "is_causal": causal, "logits_soft_cap": soft_cap}
    return _call("xla_chunked", q, k, v, window, **options)
