"""Split functions of places from the arrays that they capture, which a compiled kernel takes as operands.

Such a function is a pytree that can be called, for example a `jax.tree_util.Partial`, and its leaves are the arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Captured = tuple[jax.Array, ...]
CapturedGradients = tuple[jax.Array | None, ...]  # f32; None for integers


@dataclasses.dataclass(frozen=True)
class Frame:
    """A function without the arrays that it captures; it can be compared and hashed.

    Attributes:
      structure: the structure of the function as a pytree.
      leaves: its leaves, with None in place of the arrays.
    """

    structure: Any
    leaves: tuple[Any, ...]


def split_function(function: Callable[..., Any] | None) -> tuple[Any, Captured]:
    """Split a function into its `Frame` and the arrays that it captures; without arrays it stays as it is.

    Floating-point arrays are converted to f32, so that their gradients are added in f32.
    """
    leaves, structure = jax.tree.flatten(function)
    arrays = [isinstance(x, jax.Array | np.ndarray) for x in leaves]
    if not any(arrays):
        return function, ()
    captured = [jnp.asarray(x) for x, is_array in zip(leaves, arrays, strict=True) if is_array]
    frame = Frame(structure, tuple(None if is_array else x for x, is_array in zip(leaves, arrays, strict=True)))
    return frame, tuple(x.astype(jnp.float32) if _is_float(x) else x for x in captured)


def join_function(fixed: Any, captured: Captured) -> Callable[..., Any]:
    """Join what `split_function` split."""
    if not isinstance(fixed, Frame):
        function: Callable[..., Any] = fixed
        return function
    arrays = iter(captured)
    joined: Callable[..., Any] = jax.tree.unflatten(
        fixed.structure, [next(arrays) if x is None else x for x in fixed.leaves]
    )
    return joined


def _is_float(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def make_zeros(captured: Captured) -> CapturedGradients:
    """Create gradients of zero for the arrays, None for those of integers."""
    return tuple(jnp.zeros_like(x) if _is_float(x) else None for x in captured)


def keep_gradients(found: tuple[Any, ...]) -> CapturedGradients:
    """Replace the gradients that `jax.vjp` returns for integers by None."""
    return tuple(None if x.dtype == jax.dtypes.float0 else x for x in found)
