"""Check roughly whether a timed program computes attention, so that no wrong program is ranked by its speed.

`bench` and `tune` use this before they time a program. Whether a kernel conforms is decided only by `run`. This module
compares some queries of every batch row and head with the float64 oracle. The cotangent is zero for all other queries,
so the oracle can leave them out of the gradients too. Errors are measured against the bounds of the checks, with a
wider limit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping

import jax
import numpy as np

from cases.case import Case
from cases.masks import Dense
from cases.operand_registry import OPERANDS
from cases.operand_values import Cotangent, Problem
from conformance.cost.timing.attention_flops import compute_allowed
from conformance.truth.comparison import compare
from conformance.truth.rounding_bounds import Bounded, Expectation, compute_expectation
from conformance.truth.tolerances import Tolerances
from impls.contract.implementation import Implementation

MAX_ERROR_OVER_LIMIT = 8.0
"""Largest accepted error, as a multiple of the limit of the checks.

It is above 1, because that limit is calibrated at lengths of hundreds, and timed cases have lengths of thousands.
"""
_MAX_PAIRS = 1 << 21  # pairs of a query and a key to compare; the oracle takes a few seconds for this many
_MIN_ROWS, _MAX_ROWS = 4, 32
_BY_GRADIENT = {operand.gradient: operand for operand in OPERANDS if operand.gradient}


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Result of comparing sampled queries with the oracle."""

    error: float  # the largest error, as a multiple of the limit of the checks; may be NaN
    reason: str = ""  # description of the largest error if it is too large; otherwise empty

    @property
    def agrees(self) -> bool:
        """Whether the error is accepted; NaN is not accepted."""
        return self.error <= MAX_ERROR_OVER_LIMIT


class SampledRows:
    """Sampled queries of a problem with the oracle's results, cached by declared arithmetic and empty-row handling."""

    def __init__(self, case: Case, problem: Problem, cotangent: np.ndarray, tolerances: Tolerances) -> None:
        """Choose the queries to compare with the oracle, by the case's seed; `cotangent` of `out` is `[B, T, N, V]`."""
        self._case, self._problem, self._tolerances = case, problem, tolerances
        self.rows = choose_rows(case)
        self._allowed = compute_allowed(problem, self.rows)
        self._part = self._select_rows(problem)
        self._do = cotangent[:, self.rows]
        self._known: dict[Hashable, Expectation] = {}

    def cotangent(self, implementation: Implementation) -> np.ndarray:
        """Return a cotangent of `out`, `[B, T, N, V]`, that is zero except at sampled queries with a defined output."""
        shape = (*self._problem.q.shape[:3], self._problem.v.shape[3])
        found = np.zeros(shape, self._do.dtype)
        found[:, self.rows] = self._select_cotangent(implementation)
        return found

    def judge(self, implementation: Implementation, results: Mapping[str, np.ndarray]) -> Agreement:
        """Compare `out`, and gradients if any, with the oracle; return the comparison with the largest error.

        The gradients must have been computed with the cotangent `self.cotangent(implementation)`.
        """
        expectation = self._compute_expectation(implementation)
        expected = {"out": expectation.forward["out"], **expectation.gradients[0]}
        found = [self._compare(implementation, name, got, expected[name]) for name, got in results.items()]
        return max(found, key=lambda finding: finding.error)

    def describe_misshapen(self, name: str, shape: tuple[int, ...]) -> str:
        """Describe what is wrong with the shape of `out` or of a gradient; empty if the shape is right."""
        problem = self._problem
        if name == "out":
            expected = (*problem.q.shape[:3], problem.v.shape[3])
        else:
            expected = getattr(problem, _BY_GRADIENT[name].name).shape
        return "" if shape == expected else f"{name} has shape {list(shape)}, must be {list(expected)}"

    def _compare(self, implementation: Implementation, name: str, got: np.ndarray, expected: Bounded) -> Agreement:
        if wrong := self.describe_misshapen(name, got.shape):
            return Agreement(np.inf, wrong)
        part = got[:, self.rows] if name == "out" else _BY_GRADIENT[name].map_along(got, "T", self._taken)
        judged = self._judged(implementation) if name == "out" else None
        comparison = compare(part, expected, judged)
        limits = self._tolerances.of(implementation.arithmetic, jax.default_backend())
        error = comparison.ratio / limits.limit(self._case.dtype, name).ratio
        if error <= MAX_ERROR_OVER_LIMIT:
            return Agreement(error)
        where = comparison.problem
        if worst := comparison.worst:
            where = f"got {worst.got:.4g}, expected {worst.expected:.4g}"
        return Agreement(error, f"{name} is off by {error:.3g} times the limit of the checks: {where}")

    def _compute_expectation(self, implementation: Implementation) -> Expectation:
        arithmetic = dataclasses.replace(implementation.arithmetic, residuals="f32")  # residuals are not compared
        if self._case.dtype != "f32":
            arithmetic = dataclasses.replace(arithmetic, products="exact")  # products of bf16 and f16 are always exact
        key = (arithmetic, implementation.empty_rows)
        if key not in self._known:
            self._known[key] = compute_expectation(
                self._part,
                arithmetic,
                [Cotangent("sampled", self._select_cotangent(implementation))],
                empty_rows="mean" if implementation.empty_rows == "mean" else "zero",
            )
        return self._known[key]

    def _select_cotangent(self, implementation: Implementation) -> np.ndarray:
        return np.where(self._judged(implementation), self._do, np.zeros_like(self._do))

    def _judged(self, implementation: Implementation) -> np.ndarray:
        """Return which rows of `out` have keys or a declared value for empty rows, as booleans `[B, rows, N, 1]`."""
        keep = ~self._part.empty_rows | (implementation.empty_rows != "undefined")
        return keep.transpose(0, 2, 1)[..., None]

    def _select_rows(self, problem: Problem) -> Problem:
        """Build a problem with only the sampled queries; its mask is dense and includes the segment ids."""
        part = problem.map_along("T", self._taken)
        return dataclasses.replace(part, mask=Dense(self._allowed), segment_ids=None)

    def _taken(self, x: np.ndarray, axis: int) -> np.ndarray:
        return x.take(self.rows, axis)


def choose_rows(case: Case) -> np.ndarray:
    """Choose the queries to compare, in ascending order: the first, the last, and others drawn by the case's seed."""
    affordable = _MAX_PAIRS // (case.batch * case.num_q_heads * case.kv_length)
    count = min(case.q_length, max(_MIN_ROWS, min(_MAX_ROWS, affordable)))
    drawn = np.random.default_rng(case.seed).choice(case.q_length, count, replace=False)
    return np.unique(np.concatenate([drawn[: max(0, count - 2)], [0, case.q_length - 1]]))
