"""Validate operands of a call, by functions that several operands share.

Messages name the operand and say what it must be.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class CallSizes:
    """The sizes of q, k and v in a call."""

    batch: int
    q_length: int
    kv_length: int
    num_q_heads: int
    num_kv_heads: int


def validate_array(name: str, x: Any) -> None:
    """Raise TypeError unless `x` is an array."""
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise TypeError(f"{name} must be an array, got {type(x).__name__}: convert it with jax.numpy.asarray")


def validate_pair(name: str, x: Any) -> None:
    """Raise TypeError unless `x` is a tuple or list of two."""
    if not isinstance(x, tuple | list) or len(x) != 2:
        raise TypeError(f"{name} must be a pair of arrays: one for q and one for k, or one for k and one for v")


def validate_dtype(name: str, x: Any, dtypes: Collection[str]) -> None:
    """Raise ValueError unless the array `x` has one of `dtypes`."""
    if str(x.dtype) not in dtypes:
        raise ValueError(f"{name} must have dtype {' or '.join(dtypes)}, got {x.dtype}: cast with astype")


def validate_positive_number(name: str, x: Any, *, none: str) -> None:
    """Raise `ValueError` unless `x` is positive and finite, `TypeError` if `x` is no number or is traced.

    Messages say what None means for this operand: `none`.
    """
    try:
        number = None if isinstance(x, str | bool) else float(x)
    except (TypeError, ValueError):  # JAX raises one of these for a traced number
        number = None
    if number is None:
        raise TypeError(
            f"{name} must be a number that is known before tracing (None for {none}), got {type(x).__name__}: "
            f"pass a Python number, or make it static in jit"
        )
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be positive and finite (None for {none}), got {x}")


def validate_per_query_head(name: str, x: Any, sizes: CallSizes, dtypes: Collection[str], *, one: str) -> None:
    """Raise unless `x` is a floating-point array with one value for each query head; messages call a value `one`."""
    validate_array(name, x)
    if np.shape(x) != (sizes.num_q_heads,):
        raise ValueError(f"{name} must have shape {(sizes.num_q_heads,)}, one {one} a query head, got {np.shape(x)}")
    validate_dtype(name, x, dtypes)
