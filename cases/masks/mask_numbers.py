"""Validate the numbers in masks, such as offsets and window sizes.

They must be integers that are known before JAX traces. They are clipped so that adding a position fits in int32.
"""

from __future__ import annotations

import operator
from typing import Any

__all__ = ["FAR"]

FAR = 2**30
"""A position that no query or key reaches, so larger offsets and bounds may be clipped to it.

Kernels compute positions in int32. The sum of two numbers that are at most `FAR` fits in int32.
"""


def require_integer(name: str, value: Any) -> int:
    """Return `value` as a Python integer. Raises `TypeError`, which names `name`, if it is none or traced."""
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(
            f"{name} must be an integer that is known before tracing, got {type(value).__name__}: {value!r}; a mask is "
            f"static, and only the array of an Indexer may be traced"
        ) from error


def require_integers(name: str, values: Any) -> tuple[int, ...]:
    """Return `values` as Python integers. Raises `TypeError`, which names `name`, if one is none or traced."""
    try:
        each = tuple(values)
    except TypeError as error:
        raise TypeError(f"{name} must be a sequence of integers, got {type(values).__name__}") from error
    return tuple(require_integer(name, value) for value in each)


def clip_to_far(value: int) -> int:
    """Clip `value` to the range from `-FAR` to `FAR`."""
    return max(-FAR, min(value, FAR))
