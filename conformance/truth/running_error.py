"""Running error analysis: compute in float64 and bound how far the same computation in f32 may be off.

To first order, each operation adds its own rounding to the errors of its operands (Wilkinson 1963; Higham, Accuracy and
Stability of Numerical Algorithms, section 3.3). For an exact value `x` and a computed one `X`:

    |X - x| <= error        |XY - xy| <= |x| error(y) + |y| error(x) + u |xy|        ...

Library functions (square root, sine, cosine) are allowed twice the unit roundoff.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from conformance.truth.oracle import Array
from conformance.truth.roundoff import U, gamma


@dataclasses.dataclass(frozen=True)
class Number:
    """An array of exact values in float64 with error bounds of the same computation in f32.

    Attributes:
      value: the exact values.
      error: how far a computation in f32 may be from each.
    """

    value: Array
    error: Array

    @classmethod
    def exact(cls, value: Any) -> Number:
        """Wrap values that f32 represents exactly."""
        value = np.asarray(value, np.float64)
        return cls(value, np.zeros_like(value))

    @classmethod
    def rounded(cls, value: Any, roundoff: float = U) -> Number:
        """Wrap values that are rounded once, by default to f32."""
        value = np.asarray(value, np.float64)
        return cls(value, roundoff * np.abs(value))

    def __add__(self, other: Number) -> Number:
        return _rounded(self.value + other.value, self.error + other.error)

    def __sub__(self, other: Number) -> Number:
        return _rounded(self.value - other.value, self.error + other.error)

    def __mul__(self, other: Number) -> Number:
        error = np.abs(self.value) * other.error + np.abs(other.value) * self.error
        return _rounded(self.value * other.value, error)

    def __truediv__(self, other: Number) -> Number:
        value = self.value / other.value
        error = (self.error + np.abs(value) * other.error) / np.abs(other.value)
        return _rounded(value, error, 2 * U)  # an implementation may multiply by the reciprocal

    def __getitem__(self, where: Any) -> Number:
        return Number(self.value[where], self.error[where])

    def sqrt(self) -> Number:
        """Return the square root."""
        value = np.sqrt(self.value)
        return _rounded(value, self.error / (2 * value), 2 * U)

    def cos(self) -> Number:
        """Return the cosine."""
        return Number(np.cos(self.value), np.abs(np.sin(self.value)) * self.error + 2 * U)

    def sin(self) -> Number:
        """Return the sine."""
        return Number(np.sin(self.value), np.abs(np.cos(self.value)) * self.error + 2 * U)

    def sum(self, axis: int | tuple[int, ...], *, keepdims: bool = False) -> Number:
        """Sum over `axis`, adding the terms' errors by magnitude: all may be off in the same direction."""
        return self._summed(axis, self.error.sum(axis=axis, keepdims=keepdims), keepdims)

    def sum_of_rows(self, axis: tuple[int, ...]) -> Number:
        """Sum over `axis`, adding the terms' errors in quadrature: they are independent.

        `conformance.truth.bounds` does the same for dsinks.
        """
        return self._summed(axis, 2 * np.sqrt((self.error**2).sum(axis=axis)), False)

    def _summed(self, axis: int | tuple[int, ...], error: Array, keepdims: bool) -> Number:
        """Sum over `axis`, and add the rounding of the sum to the `error` of its terms."""
        value = self.value.sum(axis=axis, keepdims=keepdims)
        terms = self.value.size // max(1, value.size)
        sizes = np.abs(self.value).sum(axis=axis, keepdims=keepdims)
        return Number(value, error + gamma(terms) * sizes)

    def stored(self, roundoff: float, tiny: float) -> Number:
        """Round to a dtype with this unit roundoff and underflow."""
        return Number(self.value, self.error + roundoff * np.abs(self.value) + tiny * (self.error > 0))


def _rounded(value: Array, error: Array, roundoff: float = U) -> Number:
    """Add one rounding of the result to the error."""
    return Number(value, error + roundoff * np.abs(value))


def placed(parts: tuple[tuple[Array, Number], ...], whole: Number) -> Number:
    """Replace entries along the last axis of `whole` by parts.

    Args:
      parts: indices along the last axis, each with what stands there.
      whole: the array that keeps its other entries.
    """
    value, error = whole.value.copy(), whole.error.copy()
    for places, part in parts:
        value[..., places], error[..., places] = part.value, part.error
    return Number(value, error)
