"""Adapters of `tokamax.dot_product_attention` with the implementations that run on every platform.

Its documentation extends that of `jax.nn.dot_product_attention` by a soft cap after the bias, and by values of another
depth (https://github.com/openxla/tokamax, `tokamax/_src/ops/attention/api.py`). Its kernels for TPUs and GPUs are
judged as `tokamax_splash_tpu` and `tokamax_mosaic_gpu`.

The function takes its operator as `implementation`. Only the operator takes a dropout mask and a rate.
"""

from __future__ import annotations

import functools
from typing import Any

import tokamax as library
from tokamax._src.ops.attention import api

from impls.contract.declarations import declare


def _call(implementation: Any, q: Any, k: Any, v: Any, window: Any, rate: Any, kept: Any, **options: Any) -> Any:
    if rate is not None:
        implementation = functools.partial(api.IMPLEMENTATIONS[implementation], dropout_rate=rate, dropout_mask=kept)
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
    dropout_rate: float | None = None,
    dropout_mask: Any = None,
) -> Any:
    """`tokamax.dot_product_attention(implementation="xla")`."""
    options = {"mask": mask, "bias": bias, "scale": scale, "is_causal": causal, "logits_soft_cap": soft_cap}
    return _call("xla", q, k, v, window, dropout_rate, dropout_mask, **options)


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
    dropout_rate: float | None = None,
    dropout_mask: Any = None,
) -> Any:
    """`tokamax.dot_product_attention(implementation="xla_chunked")`, in blocks of 512 queries and 1024 keys."""
    options = {"mask": mask, "bias": bias, "scale": scale, "is_causal": causal, "logits_soft_cap": soft_cap}
    return _call("xla_chunked", q, k, v, window, dropout_rate, dropout_mask, **options)
