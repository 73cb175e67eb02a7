"""How tests judge numbers: by the float64 oracle and its error bounds, with the limits of the gate.

A test that asks whether a result is right has no tolerance of its own. Results of two computations that may round
differently are each compared with the truth, never with each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from cases.operand_values import Cotangent, Problem
from conformance.check_api.judgement import judge_comparison
from conformance.contract import Arithmetic
from conformance.records import PASS
from conformance.truth import tolerances
from conformance.truth.comparison import compare
from conformance.truth.oracle import EmptyRows
from conformance.truth.rounding_bounds import Bounded, compute_expectation
from conformance.truth.roundoff import get_dtype_name

TOLERANCES = tolerances.load_default_tolerances()
LIMIT = max(limit.ratio for limit in TOLERANCES.limits.values())
"""The largest ratio of an error to its bound that any dtype and observable has."""

# Every term of an error bound of f32 is proportional to f32's unit roundoff, or grows faster than it: so the bound
# holds for float64 in proportion to its own.
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
    """Forward observables and, with a cotangent, gradients: exact values and bounds, by name."""
    cotangents = [] if cotangent is None else [cotangent]
    found = compute_expectation(
        problem, arithmetic or Arithmetic(), cotangents, empty_rows=empty_rows, rounds_out=rounds_out
    )
    return {**found.forward, **{name: x for gradients in found.gradients for name, x in gradients.items()}}


def compute_float64_bounds(expected: Expected, computations: int = 1) -> dict[str, Bounded]:
    """The same values with the bounds of float64.

    With `computations=2` the values are themselves the result of a computation in float64 and not the truth: both may
    be off, so the bounds add up.
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
    """What the gate would say against each observable of `got`, none where it would pass."""
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
    """Every observable of `got` is within its limits; `judged` leaves out elements as in `compare`."""
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
    """What an implementation gave for `problem` is right: `out`, residuals and gradients, by the names of the oracle.

    Rows that may attend to nothing are to be zero; unless told otherwise, products are exact.
    """
    __tracebackhide__ = True
    expected = compute_expected(problem, cotangent, arithmetic=arithmetic)
    assert_right(got, expected, dtype=get_dtype_name(problem.q.dtype), arithmetic=arithmetic)
