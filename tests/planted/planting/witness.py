"""Witnesses: a question on which a planted bug must turn red, and the kernel without it must not.

A witness asks checks of a case, possibly of another problem than the case draws, or with other cotangents. The checks
are those of the gate, or new ones that only witnesses have: what today's cases and checks cannot ask.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

from cases.case_id import parse_case_id
from cases.operand_values import Cotangent, Problem, draw_problem
from conformance.check_api.judgement import Judgement, catch_errors
from conformance.check_api.subject import Subject
from conformance.checks import CHECKS_BY_NAME
from conformance.execution.executor import Executor
from conformance.judging.run_plan import plan_case
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from conformance.truth import tolerances
from impls.contract.implementation import Implementation

Check = Callable[[Subject], Iterable[Judgement]]
Witness = Callable[[Implementation], list[Judgement]]
_PLAIN = ("forward", "residuals")
_TRAINED = ("forward", "residuals", "gradients", "gradients_lse")


@dataclasses.dataclass(frozen=True)
class Changed(Subject):
    """A case whose problem and cotangents are changed before anything is asked."""

    change: Callable[[Problem], Problem] = lambda problem: problem
    pulled: Callable[[Cotangent], Cotangent] = lambda cotangent: cotangent

    @functools.cached_property
    def problem(self) -> Problem:
        """The operands, changed."""
        return self.change(draw_problem(self.case))

    @functools.cached_property
    def cotangents(self) -> dict[str, Cotangent]:
        """The cotangents, changed."""
        whole = Subject.cotangents.func(self)  # type: ignore[attr-defined]  # of the cached property
        return {name: self.pulled(cotangent) for name, cotangent in whole.items()}


def asked(
    case: str,
    *checks: str | Check,
    change: Callable[[Problem], Problem] = lambda problem: problem,
    pulled: Callable[[Cotangent], Cotangent] = lambda cotangent: cotangent,
) -> Witness:
    """What `checks` say of the case, by name or as they are; by default of the results, and of gradients if it trains.

    Args:
      case: its id.
      checks: names of checks of the gate, or checks.
      change: the problem to ask instead of the one that the case draws.
      pulled: the cotangents to pull back instead of those that the case draws.
    """

    def witness(implementation: Implementation) -> list[Judgement]:
        subject = Changed(
            Executor(implementation),
            parse_case_id(case),
            tolerances.load_default_tolerances(),
            change=change,
            pulled=pulled,
        )
        names = checks or (_TRAINED if subject.has_gradients else _PLAIN)
        runs = [CHECKS_BY_NAME[check].run if isinstance(check, str) else check for check in names]
        return [judgement for run in runs for judgement in catch_errors("all", functools.partial(run, subject))]

    return witness


def today(case: str, *checks: str) -> Witness:
    """What the gate of today says of the case, as `python -m conformance run --case` does."""

    def witness(implementation: Implementation) -> list[Judgement]:
        jobs = plan_case(implementation, parse_case_id(case), tuple(CHECKS_BY_NAME[name] for name in checks)).jobs
        records = [record for job in jobs for record in Runner(Settings()).judge(job)]
        return [Judgement(observable=r.observable, verdict=r.verdict, reason=r.reason) for r in records]

    return witness


def replaced(**operands: Any) -> Callable[[Problem], Problem]:
    """The problem with other operands; a function of the problem gives its operand's value."""

    def change(problem: Problem) -> Problem:
        changed: dict[str, Any] = {name: x(problem) if callable(x) else x for name, x in operands.items()}
        return dataclasses.replace(problem, **changed)

    return change
