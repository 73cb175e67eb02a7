"""Running error analysis: compute in float64 and bound how far the same computation in f32 may be off.

To first order, each operation adds its own rounding to the errors of its operands (Wilkinson 1963; Higham, Accuracy and
Stability of Numerical Algorithms, section 3.3). For an exact value `x` and a computed one `X`:

    |X - x| <= error        |XY - xy| <= |x| error(y) + |y| error(x) + u |xy|        ...

Library functions (square root, sine, cosine) are allowed twice the unit roundoff.
`conformance.truth.front_end_oracle` computes norms and rotary positions with these numbers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from conformance.truth.oracle import Array
from conformance.truth.roundoff import U, compute_gamma


@dataclasses.dataclass(frozen=True)
class BoundedNumber:
    """An array of exact values in float64 with error bounds of the same computation in f32."""

    value: Array
    error: Array

    @classmethod
    def exact(cls, value: Any) -> BoundedNumber:
        """Wrap values that f32 represents exactly."""
        value = np.asarray(value, np.float64)
        return cls(value, np.zeros_like(value))

    @classmethod
    def rounded(cls, value: Any, roundoff: float = U) -> BoundedNumber:
        """Wrap values that are rounded once, by default to f32."""
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
        return _add_rounding(value, error, 2 * U)  # two roundings: an implementation may multiply by the reciprocal

    def __getitem__(self, where: Any) -> BoundedNumber:
        return BoundedNumber(self.value[where], self.error[where])

    def sqrt(self) -> BoundedNumber:
        """Return the square root."""
        value = np.sqrt(self.value)
        return _add_rounding(value, self.error / (2 * value), 2 * U)

    def cos(self) -> BoundedNumber:
        """Return the cosine."""
        return BoundedNumber(np.cos(self.value), np.abs(np.sin(self.value)) * self.error + 2 * U)

    def sin(self) -> BoundedNumber:
        """Return the sine."""
        return BoundedNumber(np.sin(self.value), np.abs(np.cos(self.value)) * self.error + 2 * U)

    def sum(self, axis: int | tuple[int, ...], *, keepdims: bool = False) -> BoundedNumber:
        """Sum over `axis`, adding the terms' errors by magnitude: all may be off in the same direction."""
        return self._summed(axis, self.error.sum(axis=axis, keepdims=keepdims), keepdims)

    def sum_independent(self, axis: tuple[int, ...]) -> BoundedNumber:
        """Sum over `axis`, adding the terms' errors in quadrature, since they are independent."""
        return self._summed(axis, 2 * np.sqrt((self.error**2).sum(axis=axis)), False)

    def _summed(self, axis: int | tuple[int, ...], error: Array, keepdims: bool) -> BoundedNumber:
        """Sum over `axis`, and add the rounding of the sum to the `error` of its terms."""
        value = self.value.sum(axis=axis, keepdims=keepdims)
        terms = self.value.size // max(1, value.size)
        sizes = np.abs(self.value).sum(axis=axis, keepdims=keepdims)
        return BoundedNumber(value, error + compute_gamma(terms) * sizes)

    def stored(self, roundoff: float, tiny: float) -> BoundedNumber:
        """Add the error of storing the values in a dtype, given its unit roundoff and its underflow `tiny`."""
        return BoundedNumber(self.value, self.error + roundoff * np.abs(self.value) + tiny * (self.error > 0))


def _add_rounding(value: Array, error: Array, roundoff: float = U) -> BoundedNumber:
    """Add one rounding of the result to the error."""
    return BoundedNumber(value, error + roundoff * np.abs(value))


def replace_last_axis(parts: tuple[tuple[Array, BoundedNumber], ...], whole: BoundedNumber) -> BoundedNumber:
    """Replace entries along the last axis of `whole` by `parts`, which are pairs of indices and new entries."""
    value, error = whole.value.copy(), whole.error.copy()
    for places, part in parts:
        value[..., places], error[..., places] = part.value, part.error
    return BoundedNumber(value, error)
