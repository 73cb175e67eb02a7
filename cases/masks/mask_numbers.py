"""Numbers in masks: integers, known before tracing, and small enough to be added to a position in int32."""

from __future__ import annotations

import operator
from typing import Any

__all__ = ["FAR"]

FAR = 2**30
"""No query and no key stands here or beyond, so that an offset or a bound this far off can be said in another way.

The sum of two numbers up to it fits in int32, in which kernels compute positions.
"""


def require_integer(name: str, value: Any) -> int:
    """Return `value` as a Python integer.

    Raises:
      TypeError: naming it, if it is no integer or is not known before tracing.
    """
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(
            f"{name} must be an integer that is known before tracing, got {type(value).__name__}: {value!r}; a mask is "
            f"static, and only the array of an Indexer may be traced"
        ) from error


def require_integers(name: str, values: Any) -> tuple[int, ...]:
    """Return `values` as Python integers.

    Raises:
      TypeError: naming them, if they are no integers or are not known before tracing.
    """
    try:
        each = tuple(values)
    except TypeError as error:
        raise TypeError(f"{name} must be a sequence of integers, got {type(values).__name__}") from error
    return tuple(require_integer(name, value) for value in each)


def clip_to_far(value: int) -> int:
    """Clip `value` to the range from `-FAR` to `FAR`."""
    return max(-FAR, min(value, FAR))
