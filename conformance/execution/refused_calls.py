"""Translate the refusals of a function that refuses calls by `ValueError` into `NotImplementedError`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


def refuse_by_value_error(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with each `ValueError` that leaves it raised as `NotImplementedError`, with its message.

    A call that was accepted before is an exception: a later call with arguments of the same shapes, dtypes and options
    keeps its `ValueError`. The function supports such a call, so its failure is an error.
    """
    accepted: set[Any] = set()

    @functools.wraps(function)
    def refusing(*operands: Any, **options: Any) -> Any:
        call = _describe_arguments((operands, options))
        try:
            returned = function(*operands, **options)
        except ValueError as error:
            if call in accepted:
                raise
            lines = str(error).strip().splitlines() or ["no message"]
            raise NotImplementedError(f"ValueError: {lines[0]}") from error
        accepted.add(call)
        return returned

    return refusing


def _describe_arguments(x: Any) -> Any:
    """Return a hashable description of arguments: shapes and dtypes of arrays, and the text of all other values."""
    if isinstance(x, Mapping):
        return tuple((name, _describe_arguments(value)) for name, value in sorted(x.items()))
    if isinstance(x, tuple | list):
        return tuple(map(_describe_arguments, x))
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return np.shape(x), str(x.dtype)
    return repr(x)
