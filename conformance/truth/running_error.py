"""Running error analysis: numbers in float64 that know how far the same computation in f32 may be from them.

Each operation adds its own rounding to what its operands bring along, to first order (Wilkinson 1963; Higham,
Accuracy and Stability of Numerical Algorithms, section 3.3). For an exact value `x` and a computed one `X`:

    |X - x| <= error        |XY - xy| <= |x| error(y) + |y| error(x) + u |xy|        ...

Functions of the library (square root, sine, cosine) get twice the unit roundoff.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from conformance.truth.oracle import Array
from conformance.truth.roundoff import U, compute_gamma


@dataclasses.dataclass(frozen=True)
class BoundedNumber:
    """An array of exact values, and how far from each a computation in f32 may be."""

    value: Array
    error: Array

    @classmethod
    def exact(cls, value: Any) -> BoundedNumber:
        """Values that f32 has as they are."""
        value = np.asarray(value, np.float64)
        return cls(value, np.zeros_like(value))

    @classmethod
    def rounded(cls, value: Any, roundoff: float = U) -> BoundedNumber:
        """Values of which f32 has the nearest it can have."""
        value = np.asarray(value, np.float64)
        return cls(value, roundoff * np.abs(value))

    def __add__(self, other: BoundedNumber) -> BoundedNumber:
        return _add_rounding(self.value + other.value, self.error + other.error)

    def __sub__(self, other: BoundedNumber) -> BoundedNumber:
        return _add_rounding(self.value - other.value, self.error + other.error)

    def __mul__(self, other: BoundedNumber) -> BoundedNumber:
        error = np.abs(self.value) * other.error + np.abs(other.value) * self.error
        return _add_rounding(self.value * other.value, error)

    def __truediv__(self, other: BoundedNumber) -> BoundedNumber:
        value = self.value / other.value
        error = (self.error + np.abs(value) * other.error) / np.abs(other.value)
        return _add_rounding(value, error, 2 * U)  # by the reciprocal, perhaps

    def __getitem__(self, where: Any) -> BoundedNumber:
        return BoundedNumber(self.value[where], self.error[where])

    def sqrt(self) -> BoundedNumber:
        """Square root."""
        value = np.sqrt(self.value)
        return _add_rounding(value, self.error / (2 * value), 2 * U)

    def cos(self) -> BoundedNumber:
        """Cosine."""
        return BoundedNumber(np.cos(self.value), np.abs(np.sin(self.value)) * self.error + 2 * U)

    def sin(self) -> BoundedNumber:
        """Sine."""
        return BoundedNumber(np.sin(self.value), np.abs(np.cos(self.value)) * self.error + 2 * U)

    def sum(self, axis: int | tuple[int, ...], *, keepdims: bool = False) -> BoundedNumber:
        """Sum over `axis`, whose terms may all be off in the same direction."""
        return self._summed(axis, self.error.sum(axis=axis, keepdims=keepdims), keepdims)

    def sum_independent(self, axis: tuple[int, ...]) -> BoundedNumber:
        """Sum over `axis`, whose terms are off independently, as those of dsinks are (`conformance.truth.rounding_bounds`)."""
        return self._summed(axis, 2 * np.sqrt((self.error**2).sum(axis=axis)), False)

    def _summed(self, axis: int | tuple[int, ...], error: Array, keepdims: bool) -> BoundedNumber:
        value = self.value.sum(axis=axis, keepdims=keepdims)
        terms = self.value.size // max(1, value.size)
        sizes = np.abs(self.value).sum(axis=axis, keepdims=keepdims)
        return BoundedNumber(value, error + compute_gamma(terms) * sizes)

    def stored(self, roundoff: float, tiny: float) -> BoundedNumber:
        """Rounded to a dtype with this unit roundoff and underflow."""
        return BoundedNumber(self.value, self.error + roundoff * np.abs(self.value) + tiny * (self.error > 0))


def _add_rounding(value: Array, error: Array, roundoff: float = U) -> BoundedNumber:
    return BoundedNumber(value, error + roundoff * np.abs(value))


def replace_last_axis(parts: tuple[tuple[Array, BoundedNumber], ...], whole: BoundedNumber) -> BoundedNumber:
    """`whole` with its last axis replaced by each part at the part's places."""
    value, error = whole.value.copy(), whole.error.copy()
    for places, part in parts:
        value[..., places], error[..., places] = part.value, part.error
    return BoundedNumber(value, error)
