"""The numbers in a mask: whole, known before tracing, and small enough to be added to a position in int32."""

from __future__ import annotations

import operator
from typing import Any

__all__ = ["FAR"]

FAR = 2**30
"""No query and no key stands here or beyond, so that an offset or a bound this far off can be said in another way.

The sum of two numbers up to it fits in int32, in which kernels compute positions.
"""


def require_integer(name: str, value: Any) -> int:
    """`value` as a Python integer. Raises `TypeError`, naming it, if it is none or is not known yet."""
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(
            f"{name} must be an integer that is known before tracing, got {type(value).__name__}: {value!r}; a mask is "
            f"static, and only the array of an Indexer may be traced"
        ) from error


def require_integers(name: str, values: Any) -> tuple[int, ...]:
    """`values` as Python integers. Raises `TypeError`, naming them, if they are none or are not known yet."""
    try:
        each = tuple(values)
    except TypeError as error:
        raise TypeError(f"{name} must be a sequence of integers, got {type(values).__name__}") from error
    return tuple(require_integer(name, value) for value in each)


def clip_to_far(value: int) -> int:
    """`value`, or the nearest number that is at most `FAR` from 0."""
    return max(-FAR, min(value, FAR))
