"""Assert that numbers are right by the float64 oracle, its error bounds and the limits of the gate.

So a test of results needs no tolerance of its own. Two computations that may round differently are each compared with
the oracle, never with each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from cases.operand_values import Cotangent, Problem
from conformance.check_api.judgement import judge_comparison
from conformance.truth import tolerances
from conformance.truth.comparison import compare
from conformance.truth.oracle import EmptyRows
from conformance.truth.rounding_bounds import Bounded, compute_expectation
from conformance.truth.roundoff import get_dtype_name
from impls.contract.declarations import Arithmetic
from reports.records import PASS

TOLERANCES = tolerances.load_default_tolerances()
LIMIT = max(limit.ratio for limit in TOLERANCES.limits.values())
"""The largest ratio of an error to its bound that passes, over all dtypes and observables."""

# Every term of an f32 error bound is proportional to the unit roundoff of f32, or grows faster than it. So scaling the
# bound by the ratio of the unit roundoffs gives a valid float64 bound.
F64_BOUND_FACTOR = 2.0 ** (24 - 53)

Expected = Mapping[str, Bounded]


def compute_expected(
    problem: Problem,
    cotangent: Cotangent | None = None,
    *,
    arithmetic: Arithmetic | None = None,
    empty_rows: EmptyRows = "zero",
    rounds_out: bool = True,
) -> dict[str, Bounded]:
    """Return exact values and bounds by name: forward results and, with a cotangent, gradients."""
    cotangents = [] if cotangent is None else [cotangent]
    found = compute_expectation(
        problem, arithmetic or Arithmetic(), cotangents, empty_rows=empty_rows, rounds_out=rounds_out
    )
    return {**found.forward, **{name: x for gradients in found.gradients for name, x in gradients.items()}}


def compute_float64_bounds(expected: Expected, computations: int = 1) -> dict[str, Bounded]:
    """Return the expected values with the bounds of a float64 computation.

    With `computations=2` the values are themselves results of a float64 computation. Both may be off, so the bounds add
    up.
    """
    factor = computations * F64_BOUND_FACTOR
    return {name: Bounded(x.value, factor * x.bound) for name, x in expected.items()}


def list_failures(
    got: Mapping[str, Any],
    expected: Expected,
    *,
    dtype: str = "f32",
    judged: np.ndarray | None = None,
    arithmetic: Arithmetic | None = None,
) -> dict[str, str]:
    """Return the reason for each observable of `got` that the gate would fail, by name."""
    assert got, "nothing to judge"
    table = TOLERANCES.of(arithmetic or Arithmetic(), jax.default_backend())
    verdicts = {
        name: judge_comparison(name, compare(x, expected[name], judged), dtype=dtype, tolerances=table)
        for name, x in got.items()
    }
    return {name: x.reason for name, x in verdicts.items() if x.verdict != PASS}


def assert_right(
    got: Mapping[str, Any],
    expected: Expected,
    *,
    dtype: str = "f32",
    judged: np.ndarray | None = None,
    arithmetic: Arithmetic | None = None,
) -> None:
    """Assert that every observable of `got` is within its limits.

    `judged` excludes elements as in `compare`.
    """
    __tracebackhide__ = True
    wrong = list_failures(got, expected, dtype=dtype, judged=judged, arithmetic=arithmetic)
    assert not wrong, wrong


def assert_attention(
    got: Mapping[str, Any],
    problem: Problem,
    cotangent: Cotangent | None = None,
    *,
    arithmetic: Arithmetic | None = None,
) -> None:
    """Assert that an implementation's results for `problem` are right.

    Results are `out`, residuals and gradients, by the names of the oracle. Empty rows must be zero. Products are exact
    unless `arithmetic` says otherwise.
    """
    __tracebackhide__ = True
    expected = compute_expected(problem, cotangent, arithmetic=arithmetic)
    assert_right(got, expected, dtype=get_dtype_name(problem.q.dtype), arithmetic=arithmetic)
