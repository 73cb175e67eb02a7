"""Split functions of places from the arrays that they capture, which a compiled kernel takes as operands.

Such a function is a pytree that can be called, for example a `jax.tree_util.Partial`, and its leaves are the arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Captured = tuple[jax.Array, ...]
CapturedGradients = tuple[jax.Array | None, ...]  # f32; None for integers


def split_function(function: Callable[..., Any] | None) -> tuple[Any, Captured]:
    """Split a function into a fixed part, which is hashable, and the arrays that it captures, if it is a pytree.

    Floating-point arrays are converted to f32, so that their gradients are added in f32.
    """
    leaves, structure = jax.tree.flatten(function)
    if not leaves or not all(isinstance(x, jax.Array | np.ndarray) for x in leaves):
        return function, ()
    return structure, tuple(x.astype(jnp.float32) if is_float(x) else jnp.asarray(x) for x in map(jnp.asarray, leaves))


def join_function(fixed: Any, captured: Captured) -> Callable[..., Any]:
    """Join what `split_function` split."""
    function: Callable[..., Any] = jax.tree.unflatten(fixed, captured) if captured else fixed
    return function


def is_float(x: jax.Array) -> bool:
    """Return whether an array can have a gradient."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def make_zeros(captured: Captured) -> CapturedGradients:
    """Create gradients of zero for the arrays, None for those of integers."""
    return tuple(jnp.zeros_like(x) if is_float(x) else None for x in captured)


def keep_gradients(found: tuple[Any, ...]) -> CapturedGradients:
    """Replace the gradients that `jax.vjp` returns for integers by None."""
    return tuple(None if x.dtype == jax.dtypes.float0 else x for x in found)
