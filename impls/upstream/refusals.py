"""Refusing what an adapter declares unsupported: no argument is ever ignored (contract, section 7)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from cases.case import FEATURES
from cases.masks import (
    And,
    Bidirectional,
    Causal,
    Chunked,
    Dense,
    Full,
    Lengths,
    LoadBalancedCausal,
    Mask,
    Or,
    Window,
)

_MASK_FEATURES: dict[type[Mask], str] = {
    Full: "full",
    Causal: "causal",
    Window: "window",
    Chunked: "chunked",
    Bidirectional: "bidirectional",
    LoadBalancedCausal: "balanced",
    Lengths: "lengths",
}
_DTYPE_FEATURES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def refuse(
    name: str,
    unsupported: Mapping[str, str],
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Mask,
    segment_ids: Any = None,
    soft_cap: Any = None,
    sinks: Any = None,
    bias: Any = None,
    scale: Any = None,
) -> None:
    """Refuse a call that asks for a feature in `unsupported`.

    Raises:
      NotImplementedError: naming the feature and why it is not supported.
    """
    asked = (
        *mask_features(mask),
        *_shape_features(q, k, v),
        *(
            feature
            for feature, operand in (
                ("segment_ids", segment_ids),
                ("soft_cap", soft_cap),
                ("sinks", sinks),
                ("bias", bias),
                ("scale", scale),
            )
            if operand is not None
        ),
    )
    for feature in asked:
        if feature in unsupported:
            raise NotImplementedError(
                f"{name} does not support {feature} ({FEATURES[feature]}): it {unsupported[feature]}"
            )


def refuse_because(name: str, reason: str | None) -> None:
    """Refuse a call for `reason`, if there is one. Raises `NotImplementedError`."""
    if reason:
        raise NotImplementedError(f"{name} does not support this call: it {reason}")


def forward_only(name: str, reason: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which refuses for `reason` when it is differentiated."""
    run = jax.custom_vjp(function)

    def refuse_gradients(*operands: Any) -> Any:
        del operands
        refuse_because(name, reason)

    run.defvjp(refuse_gradients, refuse_gradients)
    return run


def mask_features(mask: Mask) -> Iterator[str]:
    """Feature names of a mask object; those of a case's mask spec are the same or more."""
    if isinstance(mask, And | Or):
        yield from mask_features(mask.left)
        yield from mask_features(mask.right)
    elif isinstance(mask, Dense):
        b, n = mask.array.shape[:2]
        yield from ["dense_batch"] * (b > 1) + ["dense_head"] * (n > 1) or ["dense"]
    elif type(mask) in _MASK_FEATURES:
        yield _MASK_FEATURES[type(mask)]
        if getattr(mask, "offset", 0):
            yield "offset"
    else:
        yield "dense" if mask.is_computed else "dense_batch"


def _shape_features(q: Any, k: Any, v: Any) -> Iterator[str]:
    num_q_heads, num_kv_heads = q.shape[2], k.shape[2]
    yield "mha" if num_q_heads == num_kv_heads else "mqa" if num_kv_heads == 1 else "gqa"
    if q.shape[3] != v.shape[3]:
        yield "v_head_dim"
    if q.shape[1] != k.shape[1]:
        yield "unequal_lengths"
    dtype = np.dtype(q.dtype).name
    yield _DTYPE_FEATURES.get(dtype, dtype)
