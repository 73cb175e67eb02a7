"""An implementation with declarations, and a function that says which cases it supports."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from cases.case import Case
from impls.contract.implementation import Implementation
from tests.kernels.naive import attention as right


def _supports(case: Case) -> str | None:
    if case.seed:
        return "it was told the seed"
    return f"head_dim {case.head_dim} is too large" if case.head_dim > 16 else None


def _call(q: Any, k: Any, v: Any, *, mask: Any, scale: Any = None, save_residuals: bool = False, **others: Any) -> Any:
    dense = jnp.asarray(mask.dense(q.shape[1], k.shape[1]))
    return right(q, k, v, mask=dense, scale=scale)


def _half(q: jax.Array, *others: Any, **named: Any) -> Any:
    return _call(q, *others, **named) / 2


IMPLEMENTATION = Implementation(
    name="declares",
    call=_call,
    unsupported={"segment_ids": "none", "soft_cap": "none", "sinks": "none", "bias": "none"},
    supports_case=_supports,
    residuals=frozenset(),
    differentiable_residuals=frozenset(),
    gradients=frozenset({"dq", "dk", "dv"}),
    variants={"other": _half},
)
