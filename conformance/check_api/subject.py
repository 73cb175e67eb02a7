"""Define `Subject`, which checks get: one implementation on one case, with cached results and expectations."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cases import quantization
from cases.case import Case
from cases.operand_registry import OPERAND_OF
from cases.operand_values import Cotangent, Problem, draw_cotangent, draw_problem
from conformance.check_api.branch_search_request import NO_SEARCH, BranchSearch, FurtherCase
from conformance.check_api.judgement import Judgement, judge_comparison
from conformance.check_api.subchecks import ALL_SUBCHECKS, Pullback, Subchecks, list_partial_cotangents, list_pullbacks
from conformance.execution import returned_values
from conformance.execution.executor import Calls, Executor, Result
from conformance.truth import kept_expectations
from conformance.truth.comparison import Comparison, compare
from conformance.truth.declared_formulas import compute_declared_expectation, reorder_terms
from conformance.truth.error_patterns.failure import build_failure
from conformance.truth.oracle import EmptyRows
from conformance.truth.rounding_bounds import Bounded, Expectation, OperandErrors
from conformance.truth.tolerances import Tolerances
from impls.contract.implementation import Implementation
from reports import records

# Names of cached properties of `Subject` that a copy may keep. `_OPERAND_CACHE` depends only on the case,
# `_EXPECTATION_CACHE` also on declarations, and `_RESULT_CACHE` on the case and the compiled call.
_OPERAND_CACHE = frozenset({"problem"})
_EXPECTATION_CACHE = _OPERAND_CACHE | {
    "expectation",
    "expectation_before_storing",
    "cotangents",
    "judged_out",
    "judged_residuals",
}
_RESULT_CACHE = _OPERAND_CACHE | {"forward", "residuals", "part", "_calls"}
# The most pairs of a query and a key, over all heads and batch rows, for which one program computes `out` and the
# gradients. An estimate: with more, gradients that are not needed may take longer than compiling a second program.
_MAX_PAIRS_OF_ONE_PROGRAM = 2**19


@dataclasses.dataclass(frozen=True)
class Subject:
    """One implementation on one case. Checks run on subjects.

    The results of the implementation and the expectations of the oracle are computed on first use, and cached.

    Attributes:
      executor: the object that runs the implementation, in this process or in its sandbox.
      case: the attention problem.
      tolerances: the table of limits.
      selection: the costly subchecks that run on this case (`check_api.subchecks`).
      needs_gradients: whether checks of this run will call `gradients`. Then one program computes them with `forward`.
      branch_search: what the check `branches` begins with.
      further_cases: cases that a check adds to those that are judged.
    """

    executor: Executor
    case: Case
    tolerances: Tolerances
    selection: Subchecks = ALL_SUBCHECKS
    needs_gradients: bool = False
    branch_search: BranchSearch = NO_SEARCH
    further_cases: list[FurtherCase] = dataclasses.field(default_factory=list, compare=False)

    @property
    def implementation(self) -> Implementation:
        """The implementation under test."""
        return self.executor.implementation

    def with_executor(self, executor: Executor) -> Subject:
        """Return a copy with another executor, such as one with other compiler flags; keep cached expectations."""
        return self._replace_executor(executor, _EXPECTATION_CACHE)

    def with_declarations(self, implementation: Implementation) -> Subject:
        """Return a copy with other declarations of the same call, and keep cached results.

        Cached expectations are kept only if the arithmetic, the formulas and the value of empty rows are declared as
        before.
        """
        before, after = (
            (declaring.arithmetic, declaring.formulas, declaring.empty_rows)
            for declaring in (self.implementation, implementation)
        )
        kept = _RESULT_CACHE | _EXPECTATION_CACHE if before == after else _RESULT_CACHE - _OPERAND_CACHE
        return self._replace_executor(self.executor.with_declarations(implementation), kept)

    def _replace_executor(self, executor: Executor, kept: frozenset[str]) -> Subject:
        """Return a copy with another executor that keeps the named cached values."""
        other = dataclasses.replace(self, executor=executor)
        vars(other).update({name: value for name, value in vars(self).items() if name in kept})
        return other

    def with_problem(self, problem: Problem) -> Subject:
        """Return a copy whose case has this problem, which differs from its own in `kept_pairs` only."""
        other = dataclasses.replace(self)
        vars(other)["problem"] = problem
        return other

    @functools.cached_property
    def problem(self) -> Problem:
        """The operands and the mask of the case."""
        return reorder_terms(draw_problem(self.case), self.implementation.formulas)

    @functools.cached_property
    def limits(self) -> Tolerances:
        """The limits for the declared arithmetic on this platform."""
        return self.tolerances.of(self.implementation.arithmetic, self.executor.backend)

    @property
    def has_gradients(self) -> bool:
        """Whether gradients are judged: the case is of training, and the implementation offers gradients."""
        return self.case.phase == "train" and bool(self.implementation.gradients)

    @property
    def empty_rows(self) -> EmptyRows:
        """The output that the oracle computes for queries that may attend to nothing."""
        return "mean" if self.implementation.empty_rows == "mean" else "zero"

    @functools.cached_property
    def expectation(self) -> Expectation:
        """The exact results and bounds of the case, with gradients in the order of `cotangents`."""
        declared, cotangents = self.implementation, list(self.cotangents.values())
        further = sorted(declared.further_results)
        asked = (self.problem, cotangents, declared.arithmetic, declared.formulas, self.empty_rows, further)
        return kept_expectations.compute_kept(asked, lambda: self.expect(self.problem, cotangents))

    @functools.cached_property
    def expectation_before_storing(self) -> Expectation | None:
        """The expectation for the keys and values before they were quantised; None without a quantised cache.

        The bounds include the error of quantisation. There is none if queries are quantised too, or if the call writes
        the cache: it is then given values of its own, some of which are too large to be stored. There is none either if
        sequences share stored keys and have scales of their own.
        """
        quantized = self.problem
        if quantized.kv_scales is None or self.case.q_fp8 or self.implementation.writes_pages:
            return None
        if quantized.kv_scales[0].ndim == 2 and quantized.storage is not None and quantized.storage.shares:
            return None
        factors = quantized.kv_global_scales or (1.0, 1.0)
        stored = zip((quantized.k, quantized.v), quantized.kv_scales, factors, strict=True)
        k_steps, v_steps = (quantization.compute_half_steps(*each) for each in stored)
        plain = draw_problem(dataclasses.replace(self.case, kv_cache=None))
        errors = OperandErrors(self.case.dtype, np.zeros(plain.q.shape), k_steps, v_steps)
        return self._compute_expectation(plain, inexact=errors)

    def get_expected_gradients(self, cotangent: str) -> dict[str, Bounded]:
        """Return the exact gradients and bounds for the named cotangent."""
        return self.expectation.gradients[list(self.cotangents).index(cotangent)]

    @functools.cached_property
    def cotangents(self) -> dict[str, Cotangent]:
        """The cotangents to pull back, by name.

        `random` and `random_lse` are nonzero in every judged row; only `random_lse` includes `logsumexp`. `row` and
        `head` are nonzero in a single row or head of `out`. `lse` is nonzero only for `logsumexp`. `empty` is nonzero
        only in rows that may attend to nothing. Rows with undefined output get a zero cotangent, as from a loss that
        ignores them.
        """
        if not self.has_gradients:
            return {}
        drawn = draw_cotangent(self.case)
        assert drawn.logsumexp is not None
        out = np.where(self.judged_out, drawn.out, np.zeros_like(drawn.out))
        lse = np.where(self.judged_residuals, drawn.logsumexp, np.zeros_like(drawn.logsumexp))
        parts = [
            part for part in list_partial_cotangents(self.case, self._pullbacks) if part in self.selection.cotangents
        ]
        cotangents = {}
        if "plain" in self._pullbacks:
            cotangents["random"] = Cotangent("random", out)
        if "residuals" in self._pullbacks:
            cotangents["random_lse"] = Cotangent("random_lse", out, lse)
        if "row" in parts:
            cotangents["row"] = Cotangent("row", _keep_index(out, axis=1, index=self._last_live_row))
        if "lse" in parts:
            cotangents["lse"] = Cotangent("lse", np.zeros_like(out), lse)
        if "head" in parts:
            cotangents["head"] = Cotangent("head", _keep_index(out, axis=2, index=self.case.num_q_heads - 1))
        empty = self.problem.empty_rows
        if self.implementation.empty_rows != "undefined" and empty.any():
            rows = empty.transpose(0, 2, 1)[..., None]
            cotangents["empty"] = Cotangent("empty", np.where(rows, drawn.out, np.zeros_like(drawn.out)))
        return cotangents

    @property
    def _pullbacks(self) -> tuple[Pullback, ...]:
        """The differentiable calls that `selection` names."""
        return tuple(one for one in list_pullbacks(self.implementation, self.case) if one in self.selection.pullbacks)

    @property
    def full_cotangent(self) -> str:
        """The name of the cotangent that is nonzero in every judged row: `random` or `random_lse`."""
        return "random" if "plain" in self._pullbacks else "random_lse"

    @property
    def _last_live_row(self) -> int:
        """The last query that may attend to a key in some head; the last query if none may."""
        live = (~self.problem.empty_rows & self.problem.decided).any(axis=(0, 1))
        return int(np.flatnonzero(live)[-1]) if live.any() else self.case.q_length - 1

    @functools.cached_property
    def judged_out(self) -> np.ndarray:
        """Booleans `[B, T, N, 1]`, true for the rows of `out` that are judged."""
        return self.find_judged_rows(self.problem)

    def find_judged_rows(self, problem: Problem) -> np.ndarray:
        """Return booleans `[B, T, N, 1]`, true for the rows of `out` that are judged on a problem."""
        keep = ~problem.empty_rows | (self.implementation.empty_rows != "undefined")
        keep = keep & problem.decided  # if rounding can change which keys a row selects, it has several right results
        return keep.transpose(0, 2, 1)[..., None]

    @functools.cached_property
    def judged_residuals(self) -> np.ndarray:
        """Booleans `[B, N, T]`, true for the judged rows of residuals; empty rows only if they are declared `zero`."""
        return self.find_judged_residuals(self.problem)

    def find_judged_residuals(self, problem: Problem) -> np.ndarray:
        """Return booleans `[B, N, T]`, true for the judged rows of residuals on a problem."""
        return (~problem.empty_rows | (self.implementation.empty_rows == "zero")) & problem.decided

    def find_judged_further(self, name: str, problem: Problem) -> np.ndarray:
        """Return booleans that broadcast to a further result, true where it is judged on a problem.

        The maximum of a head is not judged if a row of the head has several right results. Nor is it judged if all its
        rows are empty and such rows are not declared `zero`.
        """
        judged = self.find_judged_residuals(problem)
        if name != "head_max_logits":
            return judged[..., None]
        heads = judged.any(axis=(0, 2)) & problem.decided.all(axis=(0, 2))
        return np.asarray(heads)

    def begin_forward(self) -> None:
        """Start the forward calls ahead of time, if the executor runs them in another process."""
        if self._has_other_calls:
            self.executor.begin_calls(self.problem)
        elif self._computes_gradients_too:
            self.executor.begin_forward_and_gradients(self.problem, self.cotangents["random"])
        else:
            self.executor.begin_forward(self.problem)

    def begin_gradients(self, cotangent: str) -> None:
        """Start computing the gradients for the named cotangent ahead of time, if the case has this cotangent."""
        if cotangent in self.cotangents and not (cotangent == "random" and self._computes_gradients_too):
            self.executor.begin_gradients(self.problem, self.cotangents[cotangent])

    @property
    def _has_other_calls(self) -> bool:
        """Whether the implementation has forward calls besides the plain one: with residuals, or for parts."""
        return bool(self.implementation.has_residual_call or self.implementation.parts)

    @functools.cached_property
    def forward(self) -> Result:
        """The result of the plain call: the call on the case's own operands that returns only `out`."""
        if self._calls:
            return self._calls.forward
        return self._forward_and_gradients[0] if self._forward_and_gradients else self.executor.forward(self.problem)

    @functools.cached_property
    def residuals(self) -> Result:
        """The result of the call with residuals."""
        together = self._calls and self._calls.residuals
        return together or self.executor.residuals(self.problem)

    @functools.cached_property
    def part(self) -> Any:
        """The unnormalised part `(out, max, sum)`, exactly as the implementation returned it."""
        return self._calls.part if self._calls else self.executor.part(self.problem)

    @functools.cached_property
    def _calls(self) -> Calls | None:
        """The results of all forward calls from one program; None if there is only one call, or if it raises."""
        if not self._has_other_calls:
            return None
        try:
            return self.executor.calls(self.problem)
        except Exception:  # the separate calls raise the error again, in the checks that judge them
            return None

    @property
    def _computes_gradients_too(self) -> bool:
        """Whether one program computes `out` and the gradients for the cotangent `random`.

        It compiles faster than two, but it also runs where only `out` is needed. So it is not used for large cases.
        """
        case = self.case
        pairs = case.batch * case.num_q_heads * case.q_length * case.kv_length
        is_wanted = self.needs_gradients and not self._has_other_calls and pairs <= _MAX_PAIRS_OF_ONE_PROGRAM
        return is_wanted and "random" in self.cotangents

    @functools.cached_property
    def _forward_and_gradients(self) -> tuple[Result, Result] | None:
        """The results of the plain call and the gradients for `random`; None if separate programs compute them."""
        if not self._computes_gradients_too:
            return None
        try:
            return self.executor.forward_and_gradients(self.problem, self.cotangents["random"])
        except Exception:  # the separate calls raise the error again, in the checks that judge them
            return None

    def run_forward(self, problem: Problem) -> Result:
        """Run the plain call on other values of the same shapes, with the program that is compiled already."""
        if self._calls:
            return self.executor.calls(problem).forward
        if self._forward_and_gradients:
            return self.executor.forward_and_gradients(problem, self.cotangents["random"])[0]
        return self.executor.forward(problem)

    def run_residuals(self, problem: Problem) -> Result:
        """Run the call with residuals on another problem of the same shapes, without compiling again."""
        together = self._calls and self.executor.calls(problem).residuals
        return together or self.executor.residuals(problem)

    def run_results(self, problem: Problem) -> Mapping[str, np.ndarray]:
        """Return `out` and the offered residuals by name, on a problem of any shape.

        Raises:
          WrongReturn: if there is a residual of another name.
        """
        if problem is self.problem:
            result = self.residuals if self.implementation.residuals else self.forward
        else:
            run = self.executor.residuals if self.implementation.residuals else self.executor.forward
            result = run(problem)
        returned_values.check_names(result.values)
        return result.values

    def require_shapes(self, result: Result) -> Result:
        """Return the result unchanged, after checking that it has the shapes of the case.

        Checks call this before they compute with a result.

        Raises:
          WrongReturn: if an array of the result has another shape, or there is a residual of another name.
        """
        case = self.case
        out = case.batch, case.q_length, case.num_q_heads, case.v_head_dim
        returned_values.check_shape("out", result.values["out"], out)
        for name in returned_values.check_names(result.values):
            returned_values.check_shape(name, result.values[name], (case.batch, case.num_q_heads, case.q_length))
        return result

    def expect(self, problem: Problem, cotangents: Sequence[Cotangent] = ()) -> Expectation:
        """Return exact results and bounds on a problem, also one other than the case's own."""
        return self._compute_expectation(problem, cotangents)

    def _compute_expectation(
        self, problem: Problem, cotangents: Sequence[Cotangent] = (), inexact: OperandErrors | None = None
    ) -> Expectation:
        declared = self.implementation
        return compute_declared_expectation(
            problem,
            declared.arithmetic,
            declared.formulas,
            cotangents,
            empty_rows=self.empty_rows,
            inexact=inexact,
            further=declared.further_results,
        )

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
        """Judge a result by its expectation and the limit of `observable`.

        Args:
          observable: the name under which the table of limits has the limit.
          got: the result of the implementation.
          expected: the exact values and their bounds.
          judged: booleans broadcastable to the shape of the result; false elements are ignored. None judges all.
          label: the name in the record, if it differs from `observable`.
          flash: the gradient that the flash backward pass computes from the implementation's own residuals. The ratio
            against it is shown and not judged.
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
        """Return all expected results that were computed with `expected`; empty if it is of another problem."""
        if "expectation" not in vars(self):
            return {}
        forward = self.expectation.forward
        together = ({**forward, **gradients} for gradients in ({}, *self.expectation.gradients))
        return next((found for found in together if any(one is expected for one in found.values())), {})

    def judge_gradient(
        self, name: str, got: np.ndarray, expected: Bounded, *, flash: np.ndarray | None = None
    ) -> Judgement:
        """Judge a gradient by its expectation, and its dtype, which must be that of its operand."""
        operand = OPERAND_OF[name]
        required = np.asarray(getattr(self.problem, operand)).dtype
        judgement = self.judge(name, got, expected, flash=flash)
        return self._require_dtype(judgement, got, (required,), f"that of {operand}, {required}")

    def judge_residual(
        self, name: str, got: np.ndarray, expected: Bounded, judged: np.ndarray | None = None
    ) -> Judgement:
        """Judge a residual by its expectation, and its dtype: f32, or the operands' dtype if that is declared."""
        narrow = (self.problem.q.dtype,) if self.implementation.arithmetic.residuals == "input" else ()
        judgement = self.judge(name, got, expected, judged)
        return self._require_dtype(judgement, got, (np.dtype(np.float32), *narrow), "float32")

    def _require_dtype(
        self, judgement: Judgement, got: np.ndarray, allowed: Sequence[np.dtype[Any]], required: str
    ) -> Judgement:
        """Return the judgement, failed if the dtype of the result is not in `allowed`, even if its values are right."""
        dtype = np.asarray(got).dtype
        if dtype in allowed:
            return judgement
        wrong = f"dtype is {dtype}, must be {required}"
        if judgement.verdict == records.FAIL:
            return dataclasses.replace(judgement, reason=f"{judgement.reason}; {wrong}")
        return self.judge_malformed(judgement.observable, wrong)

    def judge_malformed(self, observable: str, problem: str, *, label: str | None = None) -> Judgement:
        """Build the failing judgement of a result that cannot be compared, for example because its shape is wrong."""
        return self._judge_comparison(observable, Comparison.malformed(problem), label, None)

    def _judge_comparison(
        self, observable: str, comparison: Comparison, label: str | None, flash: Comparison | None
    ) -> Judgement:
        """Judge a comparison by the limits of this subject."""
        table = self.limits
        return judge_comparison(
            observable, comparison, dtype=self.case.dtype, tolerances=table, label=label, flash=flash
        )

    def gradients(self, cotangent: str) -> Result:
        """Return the implementation's gradients for the named cotangent."""
        if cotangent not in self._gradient_cache:
            if cotangent == "random" and self._forward_and_gradients:
                self._gradient_cache[cotangent] = self._forward_and_gradients[1]
            else:
                self._gradient_cache[cotangent] = self.run_gradients(self.problem, self.cotangents[cotangent])
        return self._gradient_cache[cotangent]

    @functools.cached_property
    def _gradient_cache(self) -> dict[str, Result]:
        """The gradients computed so far, by cotangent."""
        return {}

    def run_gradients(self, problem: Problem, cotangent: Cotangent) -> Result:
        """Pull a cotangent back on other values of the same shapes, with the program that is compiled already."""
        if cotangent.logsumexp is None and "plain" in self._pullbacks:
            if self._forward_and_gradients:
                return self.executor.forward_and_gradients(problem, cotangent)[1]
            return self.executor.gradients(problem, cotangent)
        if cotangent.logsumexp is None:
            zeros = np.zeros(self.judged_residuals.shape, np.float32)
            cotangent = dataclasses.replace(cotangent, logsumexp=zeros)
        return self.executor.gradients_lse(problem, cotangent)


def _keep_index(cotangent: np.ndarray, *, axis: int, index: int) -> np.ndarray:
    """Return a copy of the cotangent that is zero except at one index of one axis."""
    kept = np.zeros_like(cotangent)
    place = (slice(None),) * axis + (index,)
    kept[place] = cotangent[place]
    return kept
