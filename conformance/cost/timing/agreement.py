"""Whether a timed program computes attention at all, so that nothing wrong is ranked by its speed.

This is a coarse look, not the gate: `run` is what decides whether a kernel conforms. Some queries of every batch row
and head are compared with the float64 oracle. The cotangent is zero for all other queries, so that the oracle can leave
them out of the gradients too. Errors are judged by the gate's own bounds, with room to spare.
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
from conformance.contract import Implementation
from conformance.cost.timing.attention_flops import compute_allowed
from conformance.truth.comparison import compare
from conformance.truth.rounding_bounds import Bounded, Expectation, compute_expectation
from conformance.truth.tolerances import Tolerances

MAX_ERROR_OVER_LIMIT = 8.0
"""Errors up to so many times the gate's limit agree: limits are calibrated at lengths of hundreds, not thousands."""
_MAX_PAIRS = 1 << 21  # of the oracle: a few seconds in NumPy
_MIN_ROWS, _MAX_ROWS = 4, 32
_BY_GRADIENT = {operand.gradient: operand for operand in OPERANDS if operand.gradient}


@dataclasses.dataclass(frozen=True)
class Agreement:
    """`error` is the largest error over the gate's limit; `reason` says where, if that is too much."""

    error: float
    reason: str = ""

    @property
    def agrees(self) -> bool:
        """Whether the error is no more than a coarse look allows; NaN is."""
        return self.error <= MAX_ERROR_OVER_LIMIT


class SampledRows:
    """Some queries of a problem, and what to expect of them, worked out once for each declared arithmetic."""

    def __init__(self, case: Case, problem: Problem, cotangent: np.ndarray, tolerances: Tolerances) -> None:
        self._case, self._problem, self._tolerances = case, problem, tolerances
        self.rows = choose_rows(case)
        self._allowed = compute_allowed(problem, self.rows)
        self._part = self._select_rows(problem)
        self._do = cotangent[:, self.rows]
        self._known: dict[Hashable, Expectation] = {}

    def cotangent(self, implementation: Implementation) -> np.ndarray:
        """A cotangent of `out`, `[B, T, N, V]`, that is zero but for the sampled rows with a defined output."""
        shape = (*self._problem.q.shape[:3], self._problem.v.shape[3])
        found = np.zeros(shape, self._do.dtype)
        found[:, self.rows] = self._select_cotangent(implementation)
        return found

    def judge(self, implementation: Implementation, results: Mapping[str, np.ndarray]) -> Agreement:
        """Compare what a program returned for `cotangent(implementation)`: `out`, and the gradients if it has any."""
        expectation = self._compute_expectation(implementation)
        expected = {"out": expectation.forward["out"], **expectation.gradients[0]}
        found = [self._compare(implementation, name, got, expected[name]) for name, got in results.items()]
        return max(found, key=lambda finding: finding.error)

    def describe_misshapen(self, name: str, shape: tuple[int, ...]) -> str:
        """What is wrong with the shape of `out` or of a gradient; empty if nothing is."""
        problem = self._problem
        if name == "out":
            expected = (*problem.q.shape[:3], problem.v.shape[3])
        else:
            expected = getattr(problem, _BY_GRADIENT[name].name).shape
        return "" if shape == expected else f"{name} has shape {list(shape)}, must be {list(expected)}"

    def _compare(self, implementation: Implementation, name: str, got: np.ndarray, expected: Bounded) -> Agreement:
        if wrong := self.describe_misshapen(name, got.shape):
            return Agreement(np.inf, wrong)
        part = got[:, self.rows] if name == "out" else _BY_GRADIENT[name].along(got, "T", self._taken)
        judged = self._judged(implementation) if name == "out" else None
        comparison = compare(part, expected, judged)
        limits = self._tolerances.of(implementation.arithmetic, jax.default_backend())
        error = comparison.ratio / limits.limit(self._case.dtype, name).ratio
        if error <= MAX_ERROR_OVER_LIMIT:
            return Agreement(error)
        where = comparison.problem
        if worst := comparison.worst:
            where = f"got {worst.got:.4g}, expected {worst.expected:.4g}"
        return Agreement(error, f"{name} is off by {error:.3g} times the gate's limit: {where}")

    def _compute_expectation(self, implementation: Implementation) -> Expectation:
        arithmetic = dataclasses.replace(implementation.arithmetic, residuals="f32")  # residuals are not looked at
        if self._case.dtype != "f32":
            arithmetic = dataclasses.replace(arithmetic, products="exact")  # as bf16 and f16 always multiply
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
        """Which sampled rows of `out` are defined, `[B, rows, N, 1]`."""
        keep = ~self._part.empty_rows | (implementation.empty_rows != "undefined")
        return keep.transpose(0, 2, 1)[..., None]

    def _select_rows(self, problem: Problem) -> Problem:
        """The problem of the sampled queries alone; segment ids are in its mask."""
        part = problem.along("T", self._taken)
        return dataclasses.replace(part, mask=Dense(self._allowed), segment_ids=None)

    def _taken(self, x: np.ndarray, axis: int) -> np.ndarray:
        return x.take(self.rows, axis)


def choose_rows(case: Case) -> np.ndarray:
    """Queries to look at, ascending: the first, the last, and others at irregular places, the same for each seed."""
    affordable = _MAX_PAIRS // (case.batch * case.num_q_heads * case.kv_length)
    count = min(case.q_length, max(_MIN_ROWS, min(_MAX_ROWS, affordable)))
    drawn = np.random.default_rng(case.seed).choice(case.q_length, count, replace=False)
    return np.unique(np.concatenate([drawn[: max(0, count - 2)], [0, case.q_length - 1]]))
