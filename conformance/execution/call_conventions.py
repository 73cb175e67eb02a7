"""Convert the calls of a plain function of other conventions that no declaration covers.

The follow-up of a red run calls a failing function so, to find out whether a convention explains its failures. A
function of such a convention needs a wrapper: nothing is judged by these calls.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

HEADS_FIRST, SCALE_OF_ONE = "heads_first", "scale_of_one"
CALL_CONVENTIONS = (HEADS_FIRST, SCALE_OF_ONE)
"""Operands and `out` as `[B, N, T, H]`, and a scale of 1 where none is passed."""


def convert_calls(function: Callable[..., Any], conventions: Collection[str]) -> Callable[..., Any]:
    """Return a function of the contract's conventions that calls `function` with its own `conventions`."""
    if HEADS_FIRST in conventions:
        function = _move_heads(function)
    return _pass_scale(function) if SCALE_OF_ONE in conventions else function


def _move_heads(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(q: Any, k: Any, v: Any, *others: Any, **options: Any) -> Any:
        returned = function(*(x.swapaxes(1, 2) for x in (q, k, v)), *others, **options)
        out, *residuals = returned if isinstance(returned, tuple) else (returned,)
        return (out.swapaxes(1, 2), *residuals) if isinstance(returned, tuple) else out.swapaxes(1, 2)

    return call


def _pass_scale(function: Callable[..., Any]) -> Callable[..., Any]:
    has_scale = "scale" in inspect.signature(function).parameters

    @functools.wraps(function)
    def call(q: Any, k: Any, v: Any, *others: Any, **options: Any) -> Any:
        scale = q.shape[-1] ** -0.5
        if has_scale:
            return function(q, k, v, *others, **{**options, "scale": options.get("scale") or scale})
        return function(q * scale, k, v, *others, **options)

    return call
