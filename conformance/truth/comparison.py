"""Comparing what came with what was expected, element by element, on the host.

NumPy only: on XLA:CPU, `jnp.max` of f32 drops NaN silently for arrays of 4096 elements and more. NaN never passes, and
nothing here is written as `error > bound`, which NaN would slip through.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from conformance.records import Worst
from conformance.truth.rounding_bounds import Bounded


@dataclasses.dataclass(frozen=True)
class Comparison:
    """`ratio` is the largest `|got - expected| / bound`, `rms` the root mean square, over `count` judged elements."""

    ratio: float
    rms: float
    count: int
    worst: Worst | None = None
    problem: str = ""

    @classmethod
    def malformed(cls, problem: str) -> Comparison:
        """The value cannot be compared at all."""
        return cls(np.inf, np.inf, 0, None, problem)


def compare(got: object, expected: Bounded, judged: np.ndarray | None = None) -> Comparison:
    """Compare `got` with `expected`.

    Where the bound is zero, and where the expected value is infinite, `got` must be equal.

    Args:
      got: what the implementation returned.
      expected: exact values and bounds.
      judged: booleans broadcastable to the shape; elements that are False are left out.
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
    """`|values - expected| / bound` of each element in float64: infinite for what is no number, -1 if not judged."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        error = np.abs(values - expected.value)
        ratios = error / expected.bound
    ratios = np.where(values == expected.value, 0.0, ratios)
    ratios = np.where(np.isnan(ratios), np.inf, ratios)
    return np.where(judged, ratios, -1.0)
