"""Define a pair of problems with the same static configuration and different values.

The checks `transforms`, `calls` and `first_calls` run both problems together or one after the other. The second problem
is drawn with the next seed. If the two calls wrongly share a value, the result of one of them is wrong.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cases.operand_registry import GRADIENT_OF
from cases.operand_values import Cotangent, Problem, draw_cotangent, draw_problem
from cases.quantization import rescale_queries
from conformance.check_api.judgement import Judgement
from conformance.check_api.subject import Subject
from conformance.executor_tasks import call_sequences
from conformance.truth.rounding_bounds import Bounded, Expectation


def take_numbers(problem: Problem, first: Problem) -> Problem:
    """Return the problem with the scales of quantised operands that the call of `first` has as static arguments."""
    changed: dict[str, Any] = {}
    if first.has_whole_scales:
        changed["kv_scales"] = first.kv_scales
    if first.kv_global_scales is not None:
        changed["kv_global_scales"] = first.kv_global_scales
    if first.q_scale is not None and problem.q_scale is not None:
        changed |= {"q": rescale_queries(problem.q, problem.q_scale, first.q_scale), "q_scale": first.q_scale}
    return dataclasses.replace(problem, **changed)


@dataclasses.dataclass(frozen=True)
class ProblemPair:
    """The problem of a case, and another problem with the same shapes, dtype and static arguments."""

    subject: Subject
    problems: tuple[Problem, Problem]
    cotangents: tuple[Cotangent, ...]

    @classmethod
    def draw(cls, subject: Subject) -> ProblemPair:
        """Draw the pair: the case's problem, and one with the next seed and the same mask."""
        other = dataclasses.replace(subject.case, seed=subject.case.seed + 1)
        drawn_other = dataclasses.replace(draw_problem(other), mask=subject.problem.mask)
        problems = (subject.problem, take_numbers(drawn_other, subject.problem))
        cotangents: tuple[Cotangent, ...] = ()
        if subject.has_gradients:
            drawn = (draw_cotangent(case).out for case in (subject.case, other))
            judged = (subject.find_judged_rows(problem) for problem in problems)
            pairs = zip(drawn, judged, strict=True)
            cotangents = tuple(Cotangent("random", np.where(keep, out, np.zeros_like(out))) for out, keep in pairs)
        return cls(subject, problems, cotangents)

    @functools.cached_property
    def stacked_cotangents(self) -> np.ndarray:
        """Both cotangents of `out`, stacked along a new first axis."""
        return np.stack([cotangent.out for cotangent in self.cotangents])

    @functools.cached_property
    def expected(self) -> tuple[Expectation, ...]:
        """The exact results and gradients of each problem, with bounds."""
        return tuple(self.subject.expect(p, self.cotangents[n : n + 1]) for n, p in enumerate(self.problems))

    def run_eagerly(self, problem: Problem) -> np.ndarray:
        """Return `out` of the call outside `jit`, on JAX arrays."""
        return self.subject.executor.run(call_sequences.run_eagerly, problem)

    def judge_out(self, got: Any, count: int = 1) -> Judgement:
        """Judge `out` of the case's problem, or with `count=2` of both problems stacked."""
        return self.judge_out_for(got, self.problems[:count], self.expected[:count])

    def judge_out_for(self, got: Any, problems: Sequence[Problem], expected: Sequence[Expectation]) -> Judgement:
        """Judge `out` of any problems, stacked if there are several."""
        bounded = _stack([e.forward["out"] for e in expected])
        judged = np.stack([self.subject.find_judged_rows(problem) for problem in problems])
        return self._judge("out", got, bounded, judged)

    def judge_gradients(self, got: Mapping[str, Any], count: int = 1) -> Iterator[Judgement]:
        """Judge the gradients of the case's problem, or with `count=2` of both problems stacked."""
        for operand in self.list_judged_operands(got):
            name = GRADIENT_OF[operand]
            bounded = _stack([e.gradients[0][name] for e in self.expected[:count]])
            yield self._judge(name, got[operand], bounded, None)

    def list_judged_operands(self, got: Mapping[str, Any]) -> list[str]:
        """List the operands with judged gradients, in the order in which they are judged."""
        offered = self.subject.implementation.gradients
        return [operand for operand, name in GRADIENT_OF.items() if operand in got and name in offered]

    def _judge(self, name: str, got: Any, bounded: Bounded, judged: np.ndarray | None) -> Judgement:
        array = np.asarray(got)
        array = array[None] if array.ndim == bounded.value.ndim - 1 else array
        return self.subject.judge(name, array, bounded, judged)


def _stack(bounded: Sequence[Bounded]) -> Bounded:
    return Bounded(np.stack([b.value for b in bounded]), np.stack([b.bound for b in bounded]))
