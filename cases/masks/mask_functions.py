"""Masks as functions of batch row, query head and positions, for kernels with a `mask_mod` parameter."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from cases.masks.mask_base import And, Mask, Or, iter_leaves
from cases.masks.row_masks import HeadWindow, Lengths, OwnWindow, Placed, VaryingWindow

__all__ = ["MaskFunction", "has_formula"]


def has_formula(mask: Mask) -> bool:
    """Return whether `mask` is a formula of positions, batch row and head, with no part that is an array."""
    return all(
        leaf.is_computed or isinstance(leaf, Lengths | OwnWindow | HeadWindow | Placed | VaryingWindow)
        for leaf in iter_leaves(mask)
    )


@dataclasses.dataclass(frozen=True)
class MaskFunction:
    """A function `(b, n, i, j)` that returns whether query `i` of head `n` in batch row `b` may attend to key `j`.

    All arguments are integers, or integer arrays that broadcast with each other. The arrays may be of any library with
    operators (NumPy, JAX, a Pallas tile). `i` and `j` are indices along the axes `T` and `S`, from 0. The function
    captures no array, so a kernel can call it inside its body. The result broadcasts with the arguments: it may lack
    axes along which the mask is constant.
    """

    mask: Mask

    def __post_init__(self) -> None:
        if not has_formula(self.mask):
            raise ValueError(f"mask must be a formula of places to be a function, got {self.mask}")

    def __call__(self, b: Any, n: Any, i: Any, j: Any) -> Any:
        """Return booleans: whether each query may attend to each key."""
        return _evaluate(self.mask, b, n, i, j)


def _evaluate(mask: Mask, b: Any, n: Any, i: Any, j: Any) -> Any:
    """Evaluate `mask` for batch rows `b`, heads `n`, queries `i` and keys `j`."""
    if isinstance(mask, And):
        return _evaluate(mask.left, b, n, i, j) & _evaluate(mask.right, b, n, i, j)
    if isinstance(mask, Or):
        return _evaluate(mask.left, b, n, i, j) | _evaluate(mask.right, b, n, i, j)
    if isinstance(mask, Lengths):
        return (j < _select(mask.lengths, b)) & (i >= 0)
    if isinstance(mask, OwnWindow):
        position = _select(mask.positions, b) + i
        if mask.left is None:
            return j <= position
        within = j >= position - mask.left
        return (j <= position) & (within | (j < mask.first) if mask.first else within)
    if isinstance(mask, Placed):
        return mask.mask.allowed(_select(mask.positions, b) + i, j)
    if isinstance(mask, VaryingWindow):
        position = _select(mask.positions, b) + i
        return (j <= position) & (j >= position - mask.compute_left(b, n))
    if isinstance(mask, HeadWindow):
        return (j <= i) & (j >= i - _select(mask.lefts, n))
    return mask.allowed(i, j)


def _select(numbers: Sequence[int], index: Any) -> Any:
    """Return `numbers[index]` as a sum over all numbers, so that a kernel that calls this captures no array."""
    found: Any = 0
    for place, number in enumerate(numbers):
        found = found + (index == place) * number
    return found
