"""Call adapters on small cases, and compare the results with the oracle."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import linecache
import math
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cases.case import Case
from cases.operand_values import Cotangent, Problem, draw_cotangent, draw_problem
from conformance.adaptation.recipe import Recipe, load_adapter
from conformance.execution import kernel_errors
from conformance.execution.executor import Executor
from conformance.execution.plain_functions import build_implementation
from conformance.truth.comparison import compare
from conformance.truth.declared_formulas import compute_declared_expectation
from conformance.truth.rounding_bounds import Bounded, Expectation
from conformance.truth.tolerances import load_default_tolerances
from impls.contract.implementation import Implementation

APART = 100.0
"""Another reading is told apart if its results are at least this many bounds away."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of calling an adapter on a case.

    Attributes:
      ratios: the largest distance from the oracle of each result, in bounds; infinite for a wrong shape or NaN.
      error: the exception that the call raised, in one line; empty if it returned.
      is_refusal: whether the function's own code raised the exception by a `raise` or an `assert`.
      unsupported: why the adapter does not support the case; empty if it does.
    """

    ratios: Mapping[str, float] = dataclasses.field(default_factory=dict)
    error: str = ""
    is_refusal: bool = False
    unsupported: str = ""

    @property
    def ratio(self) -> float:
        """The largest ratio; infinite if there is none."""
        return max(self.ratios.values(), default=math.inf)

    @property
    def passes(self) -> bool:
        """Whether every result is within its limit."""
        return bool(self.ratios) and self.ratio <= _get_limit()


@functools.cache
def _get_limit() -> float:
    return max(limit.ratio for limit in load_default_tolerances().limits.values())


class Prober:
    """Calls adapters, and remembers what the oracle computed.

    Attributes:
      calls: how many calls were made.
    """

    def __init__(self, seconds: float) -> None:
        self.calls = 0
        self._end = time.monotonic() + seconds
        self._expectations: dict[Any, Expectation] = {}

    @property
    def is_out_of_time(self) -> bool:
        """Whether the time for probing is over; then no further question is asked."""
        return time.monotonic() > self._end

    def probe(self, recipe: Recipe, case: Case, results: str = "out") -> Outcome:
        """Call an adapter on a case and compare the results with the oracle, by what the recipe declares.

        Args:
          results: `"out"`, `"residuals"` for it and the residuals, `"gradients"` for it and the gradients, or
            `"gradients_lse"` for those of both.
        """
        try:
            implementation = build_implementation(load_adapter(recipe), recipe.target.name)
        except Exception as error:
            return Outcome(error=kernel_errors.describe_kernel_error(error))
        if (reason := implementation.supports(case)) is not None:
            return Outcome(unsupported=reason)
        return self._judge(implementation, recipe.target.function, case, results)

    def trace(self, recipe: Recipe, case: Case) -> BaseException | None:
        """Trace an adapter on a case; returns the exception that it raises, but for `NotImplementedError`."""
        implementation = build_implementation(load_adapter(recipe), recipe.target.name)
        if implementation.supports(case) is not None:
            return None
        call, arrays = Executor(implementation).bind(draw_problem(case))
        try:
            jax.eval_shape(call, arrays)
        except NotImplementedError:
            return None
        except Exception as error:
            return error
        return None

    def _judge(self, implementation: Implementation, function: Any, case: Case, results: str) -> Outcome:
        """Call an implementation on a case and compare the results with the oracle."""
        self.calls += 1
        problem = draw_problem(case)
        cotangents: tuple[Cotangent, ...] = (draw_cotangent(case),) if results.startswith("gradients") else ()
        if results == "gradients":
            cotangents = tuple(dataclasses.replace(one, logsumexp=None) for one in cotangents)
        if results == "poison":
            dead = problem.dead_keys[..., None]
            problem = dataclasses.replace(problem, k=np.where(dead, np.nan, problem.k).astype(problem.k.dtype))
            problem = dataclasses.replace(problem, v=np.where(dead, np.nan, problem.v).astype(problem.v.dtype))
        executor = Executor(implementation)
        try:
            if results in ("out", "poison"):
                got = executor.forward(problem).values
            elif results == "residuals":
                got = executor.residuals(problem).values
            elif results == "gradients":
                got = executor.gradients(problem, cotangents[0]).values
            else:
                got = executor.gradients_lse(problem, cotangents[0]).values
        except Exception as error:
            if isinstance(error, NotImplementedError) and not _is_raised_by_jax(error):
                return Outcome(unsupported=kernel_errors.describe_refusal(error))
            return Outcome(error=kernel_errors.describe_kernel_error(error), is_refusal=is_refusal(error, function))
        expected = self.expect(implementation, case, problem, cotangents)
        ratios = {}
        for name, value in got.items():
            bounded = self._find_bounded(expected, name)
            if bounded is not None:
                rows = _select_rows(problem, implementation.empty_rows)
                judged = rows.transpose(0, 2, 1)[..., None] if name == "out" else rows
                ratios[name] = compare(value, bounded, judged if name in expected.forward else None).ratio
        return Outcome(ratios)

    def expect(self, implementation: Implementation, case: Case, problem: Problem, cotangents: Any) -> Expectation:
        """Compute the oracle's results and bounds under what an implementation declares."""
        key = (
            case,
            implementation.arithmetic,
            implementation.formulas,
            implementation.empty_rows,
            *(one.logsumexp is None for one in cotangents),
        )
        if key not in self._expectations:
            self._expectations[key] = compute_declared_expectation(
                problem,
                implementation.arithmetic,
                implementation.formulas,
                cotangents,
                empty_rows="mean" if implementation.empty_rows == "mean" else "zero",
            )
        return self._expectations[key]

    @staticmethod
    def _find_bounded(expected: Expectation, name: str) -> Bounded | None:
        if name in expected.forward:
            return expected.forward[name]
        return expected.gradients[0].get(name) if expected.gradients else None


def _select_rows(problem: Problem, empty_rows: str) -> np.ndarray:
    """Return which rows of the results are judged, `[B, N, T]`: those with a key, if empty rows may hold anything."""
    batch, q_length, heads, _ = problem.q.shape
    if empty_rows != "undefined":
        return np.ones((batch, heads, q_length), bool)
    return np.broadcast_to(problem.allowed.any(axis=-1), (batch, heads, q_length))


def _is_raised_by_jax(error: BaseException) -> bool:
    """Return whether the innermost frame of an error is one of JAX."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and bool({"jax", "jaxlib"} & set(Path(frames[-1].filename).parts))


def is_refusal(error: BaseException, function: Any) -> bool:
    """Return whether a function refused a call: a `raise` or an `assert` of its module or library, not of JAX."""
    if isinstance(error, NotImplementedError) and not _is_raised_by_jax(error):
        return True
    code = getattr(inspect.unwrap(function), "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    if code is not None and frames and frames[-1].filename == code.co_filename:
        return (frames[-1].line or "").startswith(("raise", "assert"))
    if type(error).__module__.partition(".")[0] in ("jaxtyping", "beartype"):
        return True
    place = kernel_errors.find_place(error)
    return place is not None and linecache.getline(place.file, place.line).lstrip().startswith(("raise", "assert"))
