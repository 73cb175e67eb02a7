"""Compute under JAX's default promotion of dtypes and ranks, whatever the suite has set."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax


def promote_by_default(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call a function under the defaults: JAX's own tests refuse to promote dtypes."""

    @functools.wraps(function)
    def promoting(*arguments: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return function(*arguments)

    return promoting
