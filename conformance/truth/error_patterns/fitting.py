"""Decide whether a prediction explains a wrong result: within the bounds, and not by chance.

A prediction is an array that a result may hold instead of the right one, such as the right values times 2. It is
compared with a sample of the result's elements. The same elements always give the same sample.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from conformance.truth.error_patterns.failure import Failure

MIN_EXPLAINED = 0.99
"""Least share of the elements, and of the wrong elements, that must be within the limit of the prediction."""
MIN_EVIDENCE = 8.0
"""Least number of decades by which the explained errors exceed the tolerance, all together.

With some fifty kinds of predictions, this allows one false description in a million.
"""
MAX_ENERGY_LEFT = 0.1
"""Largest share of the sum of squared errors, in units of the tolerance, that a prediction may leave.

Without this condition, loose bounds would let many predictions fit.
"""
MIN_WRONG = 2
"""Fewest wrong elements that a prediction must explain, in addition to one for each number that was fitted."""
_MAX_DISTANCE = 1e6
_MAX_SAMPLED = 4096
_F32_ROUNDOFF = 2.0**-22  # allowed for a kernel that computes the predicted values in another order than assumed


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """A sample of a wrong result's elements, by their indices along each axis."""

    failure: Failure
    index: tuple[np.ndarray, ...]

    @functools.cached_property
    def got(self) -> np.ndarray:
        """What the implementation returned."""
        return self.failure.values[self.index]

    @functools.cached_property
    def right(self) -> np.ndarray:
        """The right values."""
        return self.failure.expected.value[self.index]

    @functools.cached_property
    def bound(self) -> np.ndarray:
        """The bounds of the right values."""
        return self.failure.expected.bound[self.index]

    @functools.cached_property
    def wrong(self) -> np.ndarray:
        """Which elements are wrong."""
        return self.failure.wrong[self.index]

    def only(self, kept: np.ndarray) -> Sample:
        """Return the sample reduced to the elements where `kept` is true."""
        return Sample(self.failure, tuple(axis[kept] for axis in self.index))

    def tolerance(self, predicted: np.ndarray, bound: np.ndarray) -> np.ndarray:
        """Compute how far a correct kernel may be from a prediction whose own bound is `bound`."""
        return self.failure.limit * np.maximum(self.bound, bound) + _F32_ROUNDOFF * np.abs(predicted)

    def close(self, predicted: np.ndarray, bound: np.ndarray | None = None) -> np.ndarray:
        """Check which elements are within the limit of a prediction."""
        tolerance = self.tolerance(predicted, self.bound if bound is None else bound)
        with np.errstate(invalid="ignore"):
            return (np.abs(self.got - predicted) <= tolerance) | (self.got == predicted)

    def fits(self, predicted: np.ndarray, bound: np.ndarray | None = None, *, parameters: int = 0) -> bool:
        """Check whether a prediction explains the errors.

        `bound` is by default that of the right values; `parameters` is how many numbers were fitted to the values.
        """
        bound = self.bound if bound is None else bound
        if self.wrong.sum() < MIN_WRONG + parameters:
            return False
        close = self.close(predicted, bound)
        explained = close & self.wrong
        if close.mean() < MIN_EXPLAINED or explained.sum() < MIN_EXPLAINED * self.wrong.sum():
            return False
        tolerance = self.tolerance(predicted, bound)
        before, after = (measure_distance(tolerance, self.got, x) for x in (self.right, predicted))
        if not np.sum(after[close] ** 2) <= MAX_ENERGY_LEFT * np.sum(before[close] ** 2):
            return False
        decades = np.log10(np.clip(before[explained], 1.0, None))
        # If most predicted values are near zero, any results near zero fit them. Such a fit proves nothing.
        if (np.abs(predicted[explained]) <= self.tolerance(predicted, bound)[explained]).mean() > 0.5:
            return False
        # Each fitted number can explain one element, whatever its value. So these elements are no evidence.
        return bool(decades.sum() * (1 - parameters / len(decades)) >= MIN_EVIDENCE)


def measure_distance(tolerance: np.ndarray, got: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Compute the distance of two arrays, element by element, in units of the tolerance; at most a million."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        apart = np.where(got == other, 0.0, np.abs(got - other) / tolerance)
    return np.clip(np.nan_to_num(apart, nan=_MAX_DISTANCE, posinf=_MAX_DISTANCE), 0.0, _MAX_DISTANCE)


def sample_elements(failure: Failure, elements: np.ndarray) -> Sample:
    """Sample up to a few thousand of the informative elements (`Failure.informative`), evenly spread."""
    flat = np.flatnonzero(np.broadcast_to(elements, failure.got.shape) & failure.informative)
    if len(flat) > _MAX_SAMPLED:
        # With an even step, a sample could miss half of the rows, heads or columns.
        flat = flat[:: len(flat) // _MAX_SAMPLED | 1]
    return Sample(failure, np.unravel_index(flat, failure.got.shape))
