"""Adapters of the softmax attention of jax-linear-attention, on its XLA path.

Its docstrings are its documentation: `jla/layers/attention.py` and `jla/ops/moba.py`
(https://github.com/jla-org/jax-linear-attention). Attention is always causal over a full sequence, and its window
counts the query itself. Values of another depth are documented for its GPU kernels only.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jla.layers import attention as library
from jla.ops.moba import moba_attention

from cases import mask_spec
from cases.moba_mask import Moba
from impls.contract.declarations import declare
from impls.contract.implementation import Implementation

_FULL_SEQUENCE = dict.fromkeys(("unequal_lengths", "prefill", "decode"), "a full sequence of queries and keys")


@declare(
    behind_mask="finite",
    unsupported={**_FULL_SEQUENCE, "full": "always causal", "v_head_dim": "documented for its GPU kernels only"},
)
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: Any = None,
    segment_ids: Any = None,
    sinks: Any = None,
    scale: Any = None,
) -> Any:
    """`jla.layers.attention.attention`, which calls `jax.nn.dot_product_attention` unless there are sinks."""
    if not causal and (window is None or window[1] != 0):
        raise NotImplementedError("attention is always causal")
    if window is not None and window[1] not in (0, None):
        raise NotImplementedError("a window has no keys after the query")
    sliding_window = None if window is None or window[0] is None else window[0] + 1
    ids = None if segment_ids is None else segment_ids[0]
    return library.attention(q, k, v, segment_ids=ids, sliding_window=sliding_window, scale=scale, sinks=sinks)


@declare(empty_rows="zero", behind_mask="finite", unsupported={"v_head_dim": "values have the depth of keys"})
def sink_attention(q: Any, k: Any, v: Any, *, mask: Any = None, sinks: Any, scale: Any = None) -> Any:
    """`jla.layers.attention.sink_attention`, attention with sinks under any mask."""
    if sinks is None:
        raise NotImplementedError("sinks are required")
    return library.sink_attention(q, k, v, jnp.ones((1, 1, 1, 1), bool) if mask is None else mask, sinks, scale=scale)


def _call_moba(q: Any, k: Any, v: Any, *, mask: Any, scale: Any = None, **operands: Any) -> Any:
    if not isinstance(mask, Moba) or mask.offset or any(x is not None and x is not False for x in operands.values()):
        raise NotImplementedError("a MoBA mask and a scale, and nothing else")
    if q.shape[1] != k.shape[1] or q.shape[3] != v.shape[3]:
        raise NotImplementedError("a full sequence, and values of the depth of keys")
    return moba_attention(q, k, v, block_size=mask.chunk, top_k=mask.topk, scale=scale)


def _find_unsupported(case: Any) -> str | None:
    return None if mask_spec.list_mask_features(case.mask) == ["moba"] else "a MoBA mask only"


MOBA = Implementation(
    name="library:jla.moba",
    call=_call_moba,
    description="`jla.ops.moba.moba_attention`: MoBA by a mask for `jax.nn.dot_product_attention`.",
    offers=frozenset({"moba"}),
    unsupported={
        **_FULL_SEQUENCE,
        **dict.fromkeys(("segment_ids", "soft_cap", "sinks", "bias", "offset"), "no such parameter"),
        "v_head_dim": "values have the depth of keys",
    },
    supports_case=_find_unsupported,
    residuals=frozenset(),
    differentiable_residuals=frozenset(),
    behind_mask="finite",
)
