"""Compare results with the oracle, element by element, in NumPy.

`compare` takes a result and the exact values with their bounds. It returns the largest ratio of error to bound, and the
root mean square of the ratios.

NaN never passes. So nothing here is written as `error > bound`, which is false for NaN. JAX is not used either: on
XLA:CPU, `jnp.max` of f32 silently drops NaN in arrays of 4096 elements and more.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from conformance.truth.rounding_bounds import Bounded
from reports.records import Worst


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The distance of a result from the oracle, in units of its error bound."""

    ratio: float  # the largest `|got - expected| / bound` of the judged elements
    rms: float  # the root mean square of these ratios
    count: int
    worst: Worst | None = None  # the element with the largest ratio, if any was judged
    problem: str = ""  # why the result cannot be compared at all; otherwise empty

    @classmethod
    def malformed(cls, problem: str) -> Comparison:
        """Return the comparison of a result that cannot be compared, for the reason `problem`."""
        return cls(np.inf, np.inf, 0, None, problem)


def compare(got: object, expected: Bounded, judged: np.ndarray | None = None) -> Comparison:
    """Compare a result with exact values and their bounds.

    Where the bound is zero or the expected value is infinite, the result must be equal.

    Args:
      judged: booleans broadcastable to the shape; elements where it is False are not compared. By default all are.
    """
    array = np.asarray(got)
    if array.shape != expected.value.shape:
        return Comparison.malformed(f"shape is {array.shape}, must be {expected.value.shape}")
    if array.dtype.kind != "f" and array.dtype != ml_dtypes.bfloat16:
        return Comparison.malformed(f"dtype is {array.dtype.name}, must be a real floating-point one")
    values = array.astype(np.float64)
    mask = np.ones(values.shape, bool) if judged is None else np.broadcast_to(judged, values.shape)
    ratios = compute_ratios(values, expected, mask)
    count = int(mask.sum())
    if count == 0:
        return Comparison(0.0, 0.0, 0)
    index = np.unravel_index(int(np.argmax(ratios)), ratios.shape)
    worst = Worst(
        index=tuple(int(n) for n in index),
        got=float(values[index]),
        expected=float(expected.value[index]),
        bound=float(expected.bound[index]),
    )
    rms = float(np.sqrt(np.mean(np.square(ratios[mask]))))
    return Comparison(float(ratios[index]), rms, count, worst)


def compute_ratios(values: np.ndarray, expected: Bounded, judged: np.ndarray) -> np.ndarray:
    """Compute `|values - expected| / bound` of each element, in float64: infinite for NaN, -1 if not judged."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        error = np.abs(values - expected.value)
        ratios = error / expected.bound
    ratios = np.where(values == expected.value, 0.0, ratios)
    ratios = np.where(np.isnan(ratios), np.inf, ratios)
    return np.where(judged, ratios, -1.0)
