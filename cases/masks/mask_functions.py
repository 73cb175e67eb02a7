"""Masks as functions of batch row, query head and places, for kernels that compute a mask where they have the logit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from cases.masks.mask_base import And, Mask, Or, iter_leaves
from cases.masks.row_masks import Lengths, OwnWindow

__all__ = ["MaskFunction", "has_formula"]


def has_formula(mask: Mask) -> bool:
    """Whether `mask` is a formula of places, and of what each batch row has: one that is an array is none."""
    return all(leaf.is_computed or isinstance(leaf, Lengths | OwnWindow) for leaf in iter_leaves(mask))


@dataclasses.dataclass(frozen=True)
class MaskFunction:
    """`(b, n, i, j) -> booleans`: whether query `i` of head `n` in batch row `b` may attend to key `j`.

    All are integers or integer arrays that broadcast with each other, of any library with operators (NumPy, JAX, a
    Pallas tile); `i` and `j` are places along the axes, from 0. It captures no array. What it gives broadcasts with
    them: axes along which nothing differs may be left out.
    """

    mask: Mask

    def __post_init__(self) -> None:
        if not has_formula(self.mask):
            raise ValueError(f"mask must be a formula of places to be a function, got {self.mask}")

    def __call__(self, b: Any, n: Any, i: Any, j: Any) -> Any:
        """Whether each pair may attend."""
        return _evaluate(self.mask, b, i, j)


def _evaluate(mask: Mask, b: Any, i: Any, j: Any) -> Any:
    if isinstance(mask, And):
        return _evaluate(mask.left, b, i, j) & _evaluate(mask.right, b, i, j)
    if isinstance(mask, Or):
        return _evaluate(mask.left, b, i, j) | _evaluate(mask.right, b, i, j)
    if isinstance(mask, Lengths):
        return (j < _select_row(mask.lengths, b)) & (i >= 0)
    if isinstance(mask, OwnWindow):
        position = _select_row(mask.positions, b) + i
        return (j <= position) if mask.left is None else (j <= position) & (j >= position - mask.left)
    return mask.allowed(i, j)


def _select_row(numbers: Sequence[int], b: Any) -> Any:
    """The number of batch row `b`, found without an array of them."""
    found: Any = 0
    for row, number in enumerate(numbers):
        found = found + (b == row) * number
    return found
