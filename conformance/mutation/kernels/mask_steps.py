"""Kernels that take a mask for another one, and conditions on the masks of cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cases.masks import And, Mask, Or
from conformance.mutation.kernels.plain import Call, PlainSteps
from conformance.mutation.kernels.triggers import Trigger


def _replaced(mask: Mask, change: Callable[[Mask, Call], Mask], call: Call) -> Mask:
    if isinstance(mask, And | Or):
        return type(mask)(_replaced(mask.left, change, call), _replaced(mask.right, change, call))
    return change(mask, call)


def each(kind: type[Mask], change: Callable[[Any, Call], Mask]) -> PlainSteps:
    """The kernel that takes every mask of a kind for another mask."""

    def replace(mask: Mask, call: Call) -> Mask:
        return change(mask, call) if type(mask) is kind else mask

    return PlainSteps(mask=lambda mask, call: _replaced(mask, replace, call).dense(call.q_length, call.kv_length))


def whole(change: Callable[[Mask, Call], Mask]) -> PlainSteps:
    """The kernel that takes the mask as a whole for another."""
    return PlainSteps(mask=lambda mask, call: change(mask, call).dense(call.q_length, call.kv_length))


def pairs(change: Callable[[np.ndarray], np.ndarray]) -> PlainSteps:
    """The kernel that gets other booleans `[b, n, T, S]`."""
    return PlainSteps(mask=lambda mask, call: change(mask.dense(call.q_length, call.kv_length)))


def mask_is(spec: str) -> Trigger:
    """The mask is exactly that."""
    return lambda case: case.mask == spec


def mask_starts(prefix: str, *, offset: bool = False) -> Trigger:
    """The mask's spec starts so, and has an offset if asked."""
    return lambda case: case.mask.startswith(prefix) and (not offset or "-o" in case.mask)
