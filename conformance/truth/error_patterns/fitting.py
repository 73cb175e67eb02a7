"""When a form fits: what it predicts is right by the same bounds, and chance would not have made it so.

A sample of the elements is enough: the same ones for the same shapes.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from conformance.truth.error_patterns.failure import Failure

MIN_EXPLAINED = 0.99
"""The share of the elements, and of the wrong ones among them, that must come within the limit."""
MIN_EVIDENCE = 8.0
"""Decades by which all errors together had to shrink: for the fifty or so forms, one false claim in a million."""
MAX_ENERGY_LEFT = 0.1
"""The share of the errors' energy, in units of the bound, that may be left: by loose bounds much would come near."""
MIN_WRONG = 2
"""Wrong elements that it must explain at least, beside one for each number that is fitted."""
_MAX_DISTANCE = 1e6
_MAX_SAMPLED = 4096
_F32_ROUNDOFF = 2.0**-22  # rounding what is predicted, when it is computed in another order than the bound has it


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """Elements of a place: their indices, what came there, what is right, and the bound."""

    failure: Failure
    index: tuple[np.ndarray, ...]

    @functools.cached_property
    def got(self) -> np.ndarray:
        """What came."""
        return self.failure.values[self.index]

    @functools.cached_property
    def right(self) -> np.ndarray:
        """What is right."""
        return self.failure.expected.value[self.index]

    @functools.cached_property
    def bound(self) -> np.ndarray:
        """The bound of what is right."""
        return self.failure.expected.bound[self.index]

    @functools.cached_property
    def wrong(self) -> np.ndarray:
        """Which of them are wrong."""
        return self.failure.wrong[self.index]

    def only(self, kept: np.ndarray) -> Sample:
        """Some of the elements."""
        return Sample(self.failure, tuple(axis[kept] for axis in self.index))

    def tolerance(self, predicted: np.ndarray, bound: np.ndarray) -> np.ndarray:
        """How far from a prediction, whose own bound is `bound`, a right kernel would be."""
        return self.failure.limit * np.maximum(self.bound, bound) + _F32_ROUNDOFF * np.abs(predicted)

    def close(self, predicted: np.ndarray, bound: np.ndarray | None = None) -> np.ndarray:
        """Which elements are within the limit of a prediction."""
        tolerance = self.tolerance(predicted, self.bound if bound is None else bound)
        with np.errstate(invalid="ignore"):
            return (np.abs(self.got - predicted) <= tolerance) | (self.got == predicted)

    def fits(self, predicted: np.ndarray, bound: np.ndarray | None = None, *, parameters: int = 0) -> bool:
        """Whether a prediction explains the errors; `parameters` is how many numbers of it were fitted."""
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
        # Zeros stand in many places: what is predicted must be more than nothing, or it is not that which was found.
        if (np.abs(predicted[explained]) <= self.tolerance(predicted, bound)[explained]).mean() > 0.5:
            return False
        # A number that was fitted to them explains as many elements whatever they are.
        return bool(decades.sum() * (1 - parameters / len(decades)) >= MIN_EVIDENCE)


def measure_distance(tolerance: np.ndarray, got: np.ndarray, other: np.ndarray) -> np.ndarray:
    """How far two are apart, at most a million times the tolerance."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        apart = np.where(got == other, 0.0, np.abs(got - other) / tolerance)
    return np.clip(np.nan_to_num(apart, nan=_MAX_DISTANCE, posinf=_MAX_DISTANCE), 0.0, _MAX_DISTANCE)


def sample_elements(failure: Failure, elements: np.ndarray) -> Sample:
    """At most some thousands of the judged elements among `elements`, evenly spread over them."""
    flat = np.flatnonzero(np.broadcast_to(elements, failure.got.shape) & failure.informative)
    if len(flat) > _MAX_SAMPLED:
        # An odd step, so that no power of two of rows, heads or columns is met in part only.
        flat = flat[:: len(flat) // _MAX_SAMPLED | 1]
    return Sample(failure, np.unravel_index(flat, failure.got.shape))
