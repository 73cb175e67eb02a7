"""One implementation on one case: its results and what to expect, each computed once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cases import quantization
from cases.case import Case
from cases.operand_values import Cotangent, Problem, draw_cotangent, draw_problem
from conformance import records
from conformance.check_api.judgement import Judgement, judge_comparison
from conformance.check_api.rotation import FULL_ROTATION, Pullback, Rotation, list_parts, list_pullbacks
from conformance.contract import Implementation
from conformance.execution import kernel_errors
from conformance.execution.executor import Calls, Executor, Result
from conformance.truth.comparison import Comparison, compare
from conformance.truth.error_patterns.failure import build_failure
from conformance.truth.oracle import EmptyRows
from conformance.truth.rounding_bounds import Bounded, Expectation, OperandErrors, compute_expectation
from conformance.truth.tolerances import Tolerances

# What a subject keeps once it is computed: of the oracle, and of the implementation.
_OPERAND_CACHE = frozenset({"problem"})
_EXPECTATION_CACHE = _OPERAND_CACHE | {"expectation", "before_storing", "cotangents", "judged_out", "_defined"}
_RESULT_CACHE = _OPERAND_CACHE | {"forward", "residuals", "part", "_calls"}


@dataclasses.dataclass(frozen=True)
class Subject:
    """What the checks look at, and what it is the case's turn to be asked."""

    executor: Executor
    case: Case
    tolerances: Tolerances
    rotation: Rotation = FULL_ROTATION

    @property
    def implementation(self) -> Implementation:
        """The implementation under test."""
        return self.executor.implementation

    def with_executor(self, executor: Executor) -> Subject:
        """The same, run by an executor that compiles otherwise: what is expected stays as it was found."""
        return self._replace_executor(executor, _EXPECTATION_CACHE)

    def declaring(self, implementation: Implementation) -> Subject:
        """The same call under other declarations: what it returned stays as it was found.

        So does what is expected, where the arithmetic and what empty rows return are declared as before.
        """
        before = self.implementation
        same = (before.arithmetic, before.empty_rows) == (implementation.arithmetic, implementation.empty_rows)
        return self._replace_executor(
            self.executor.with_declarations(implementation),
            _RESULT_CACHE | _EXPECTATION_CACHE if same else _RESULT_CACHE,
        )

    def _replace_executor(self, executor: Executor, kept: frozenset[str]) -> Subject:
        other = dataclasses.replace(self, executor=executor)
        vars(other).update({name: found for name, found in vars(self).items() if name in kept})
        return other

    @functools.cached_property
    def problem(self) -> Problem:
        """The operands."""
        return draw_problem(self.case)

    @functools.cached_property
    def limits(self) -> Tolerances:
        """The table for what the implementation declares, on this platform."""
        return self.tolerances.of(self.implementation.arithmetic, self.executor.backend)

    @property
    def has_gradients(self) -> bool:
        """Whether the case asks for gradients and the implementation offers any."""
        return self.case.phase == "train" and bool(self.implementation.gradients)

    @property
    def empty_rows(self) -> EmptyRows:
        """What the oracle returns for rows that may attend to nothing."""
        return "mean" if self.implementation.empty_rows == "mean" else "zero"

    @functools.cached_property
    def expectation(self) -> Expectation:
        """Exact results and bounds, gradients in the order of `cotangents`."""
        return compute_expectation(
            self.problem,
            self.implementation.arithmetic,
            list(self.cotangents.values()),
            empty_rows=self.empty_rows,
        )

    @functools.cached_property
    def expectation_before_storing(self) -> Expectation | None:
        """What attention to the keys and values gives that a quantised cache was made of, none without one.

        The bounds include what storing them costs.
        """
        stored = self.problem
        if stored.kv_scales is None:
            return None
        pairs = zip((stored.k, stored.v), stored.kv_scales, strict=True)
        k_steps, v_steps = (quantization.compute_half_steps(*pair) for pair in pairs)
        plain = draw_problem(dataclasses.replace(self.case, kv_cache=None))
        stored_to = OperandErrors(self.case.dtype, np.zeros(plain.q.shape), k_steps, v_steps)
        return compute_expectation(plain, self.implementation.arithmetic, empty_rows=self.empty_rows, inexact=stored_to)

    def expected_gradients(self, cotangent: str) -> dict[str, Bounded]:
        """Expected gradients for the named cotangent."""
        return self.expectation.gradients[list(self.cotangents).index(cotangent)]

    @functools.cached_property
    def cotangents(self) -> dict[str, Cotangent]:
        """The cotangents to pull back, by name.

        `random` and `random_lse` reach every row that is judged; `row` and `head` a single one; `lse` is
        zero for `out`; `empty` reaches only rows that may attend to nothing. Rows whose output is undefined get a zero
        cotangent, as a loss that ignores them gives.
        """
        if not self.has_gradients:
            return {}
        drawn = draw_cotangent(self.case)
        assert drawn.logsumexp is not None
        out = np.where(self.judged_out, drawn.out, np.zeros_like(drawn.out))
        lse = np.where(self.judged_residuals, drawn.logsumexp, np.zeros_like(drawn.logsumexp))
        parts = [part for part in list_parts(self.case, self._pulled) if part in self.rotation.cotangents]
        found = {}
        if "plain" in self._pulled:
            found["random"] = Cotangent("random", out)
        if "residuals" in self._pulled:
            found["random_lse"] = Cotangent("random_lse", out, lse)
        if "row" in parts:
            found["row"] = Cotangent("row", _keep_index(out, axis=1, index=self._last_live_row))
        if "lse" in parts:
            found["lse"] = Cotangent("lse", np.zeros_like(out), lse)
        if "head" in parts:
            found["head"] = Cotangent("head", _keep_index(out, axis=2, index=self.case.num_q_heads - 1))
        empty = self.problem.empty_rows
        if self.implementation.empty_rows != "undefined" and empty.any():
            rows = empty.transpose(0, 2, 1)[..., None]
            found["empty"] = Cotangent("empty", np.where(rows, drawn.out, np.zeros_like(drawn.out)))
        return found

    @property
    def _pulled(self) -> tuple[Pullback, ...]:
        """Which calls get differentiated, of those that can be."""
        return tuple(call for call in list_pullbacks(self.implementation, self.case) if call in self.rotation.pulled)

    @property
    def full_cotangent(self) -> str:
        """The name of a cotangent that reaches every row that is judged."""
        return "random" if "plain" in self._pulled else "random_lse"

    @property
    def _last_live_row(self) -> int:
        live = (~self.problem.empty_rows & self.problem.decided).any(axis=(0, 1))
        return int(np.flatnonzero(live)[-1]) if live.any() else self.case.q_length - 1

    @functools.cached_property
    def judged_out(self) -> np.ndarray:
        """Which rows of `out` are judged, `[B, T, N, 1]`."""
        return self.find_judged_rows(self.problem)

    def find_judged_rows(self, problem: Problem) -> np.ndarray:
        """Which rows of `out` are judged on another problem, `[B, T, N, 1]`."""
        keep = ~problem.empty_rows | (self.implementation.empty_rows != "undefined")
        keep = keep & problem.decided  # where rounding may choose other keys, there is more than one right answer
        return keep.transpose(0, 2, 1)[..., None]

    @property
    def judged_residuals(self) -> np.ndarray:
        """Which rows of the residuals are judged, `[B, N, T]`: those of empty rows only where they are defined."""
        return self._defined

    @functools.cached_property
    def _defined(self) -> np.ndarray:
        return (~self.problem.empty_rows | (self.implementation.empty_rows == "zero")) & self.problem.decided

    def begin_forward(self) -> None:
        """Have the implementation start on its forward calls, if that is in another process."""
        if self._has_other_calls:
            self.executor.begin_calls(self.problem)
        else:
            self.executor.begin_forward(self.problem)

    def begin_gradients(self, cotangent: str) -> None:
        """Have it start on the gradients for the named cotangent, if there is one."""
        if cotangent in self.cotangents:
            self.executor.begin_gradients(self.problem, self.cotangents[cotangent])

    @property
    def _has_other_calls(self) -> bool:
        """Whether there are other forward calls than the plain one."""
        return bool(self.implementation.residuals or self.implementation.parts)

    @functools.cached_property
    def forward(self) -> Result:
        """The plain call."""
        return self._calls.forward if self._calls else self.executor.forward(self.problem)

    @functools.cached_property
    def residuals(self) -> Result:
        """The call with residuals."""
        together = self._calls and self._calls.residuals
        return together or self.executor.residuals(self.problem)

    @functools.cached_property
    def part(self) -> Any:
        """Attention that is not normalised, as it was returned."""
        return self._calls.part if self._calls else self.executor.part(self.problem)

    @functools.cached_property
    def _calls(self) -> Calls | None:
        """All forward calls at once; none if one of them raises, so that each can be asked by itself."""
        if not self._has_other_calls:
            return None
        try:
            return self.executor.calls(self.problem)
        except Exception:  # the separate calls raise it again, where it is judged
            return None

    def run_forward(self, problem: Problem) -> Result:
        """The plain call on other values of the same shapes, by a program that is compiled already."""
        return self.executor.calls(problem).forward if self._calls else self.executor.forward(problem)

    def run_residuals(self, problem: Problem) -> Result:
        """The call with residuals on other values of the same shapes, by the program that is compiled already."""
        together = self._calls and self.executor.calls(problem).residuals
        return together or self.executor.residuals(problem)

    def run_results(self, problem: Problem) -> Mapping[str, np.ndarray]:
        """`out` and the residuals that are offered, on a problem of any shape."""
        if problem is self.problem:
            return (self.residuals if self.implementation.residuals else self.forward).values
        run = self.executor.residuals if self.implementation.residuals else self.executor.forward
        return run(problem).values

    def require_shapes(self, result: Result) -> Result:
        """The result of a call on operands of the case's shapes, for what is computed of it without comparing.

        Raises:
          WrongReturn: if it has another shape than it must have.
        """
        case = self.case
        out = case.batch, case.q_length, case.num_q_heads, case.v_head_dim
        kernel_errors.check_shape("out", result.values["out"], out)
        for name in result.values.keys() - {"out"}:
            kernel_errors.check_shape(name, result.values[name], (case.batch, case.num_q_heads, case.q_length))
        return result

    def expect(self, problem: Problem, cotangents: Sequence[Cotangent] = ()) -> Expectation:
        """Exact results and bounds on another problem."""
        return compute_expectation(problem, self.implementation.arithmetic, cotangents, empty_rows=self.empty_rows)

    def judge(
        self,
        observable: str,
        got: object,
        expected: Bounded,
        judged: np.ndarray | None = None,
        *,
        label: str | None = None,
        flash: np.ndarray | None = None,
    ) -> Judgement:
        """Judge what came by what was expected, within the limit of `observable`.

        Args:
          observable: which limit applies.
          got: what came.
          expected: exact values and bounds.
          judged: booleans broadcastable to the shape; elements that are False are left out.
          label: how the record names the observable, if not by its plain name.
          flash: what the flash backward gives from the implementation's own saved results, shown beside the truth.
        """
        comparison = compare(got, expected, judged)
        against_flash = None if flash is None else compare(got, dataclasses.replace(expected, value=flash), judged)
        judgement = self._judge_comparison(observable, comparison, label, against_flash)
        if judgement.verdict != records.FAIL or comparison.problem:
            return judgement
        limit = self.limits.limit(self.case.dtype, observable).ratio
        core = self._find_results(expected)
        failure = build_failure(observable, got, expected, judged, limit=limit, problem=self.problem, core=core)
        return dataclasses.replace(judgement, failure=failure)

    def _find_results(self, expected: Bounded) -> Mapping[str, Bounded]:
        """The results of the case among which `expected` is, none if it is another's."""
        if "expectation" not in vars(self):
            return {}
        forward = self.expectation.forward
        together = ({**forward, **gradients} for gradients in ({}, *self.expectation.gradients))
        return next((found for found in together if any(one is expected for one in found.values())), {})

    def malformed(self, observable: str, problem: str, *, label: str | None = None) -> Judgement:
        """The judgement of what cannot be compared at all."""
        return self._judge_comparison(observable, Comparison.malformed(problem), label, None)

    def _judge_comparison(
        self, observable: str, comparison: Comparison, label: str | None, flash: Comparison | None
    ) -> Judgement:
        table = self.limits
        return judge_comparison(
            observable, comparison, dtype=self.case.dtype, tolerances=table, label=label, flash=flash
        )

    def gradients(self, cotangent: str) -> Result:
        """The named cotangent pulled back through the implementation."""
        if cotangent not in self._pulled_back:
            self._pulled_back[cotangent] = self.run_gradients(self.problem, self.cotangents[cotangent])
        return self._pulled_back[cotangent]

    @functools.cached_property
    def _pulled_back(self) -> dict[str, Result]:
        """What `gradients` has found, by cotangent."""
        return {}

    def run_gradients(self, problem: Problem, cotangent: Cotangent) -> Result:
        """A cotangent pulled back on any values of the same shapes, by a program that is compiled already."""
        if cotangent.logsumexp is None and "plain" in self._pulled:
            return self.executor.gradients(problem, cotangent)
        if cotangent.logsumexp is None:
            none = np.zeros(self.judged_residuals.shape, np.float32)
            cotangent = dataclasses.replace(cotangent, logsumexp=none)
        return self.executor.gradients_lse(problem, cotangent)


def _keep_index(cotangent: np.ndarray, *, axis: int, index: int) -> np.ndarray:
    kept = np.zeros_like(cotangent)
    place = (slice(None),) * axis + (index,)
    kept[place] = cotangent[place]
    return kept
