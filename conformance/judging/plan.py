"""What a run judges: jobs, each one implementation on one case under some checks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from cases.case import Case, matches
from cases.regressions import REGRESSIONS
from conformance.asking.scopes import GRID, SCOPES, Asked
from conformance.asking.turn import EVERYTHING, Turn
from conformance.checks import CHECKS, Check
from conformance.contract import Implementation
from conformance.judging.turns import taken, taken_by_sizes


@dataclasses.dataclass(frozen=True)
class Job:
    """One implementation on one case under some checks, which share compiled functions and expectations."""

    implementation: Implementation
    case: Case
    checks: tuple[Check, ...]
    turn: Turn = EVERYTHING

    @property
    def on_grid(self) -> bool:
        """Whether it is a case of the covering grid under the checks that are asked of each."""
        return {check.scope for check in self.checks} == {GRID}

    @property
    def short(self) -> bool:
        """Whether it is few programs."""
        return all(check.scope.short for check in self.checks)

    @property
    def id(self) -> str:
        """`implementation-case`, with the checks where they are not those of the grid."""
        extra = "" if self.on_grid else "-".join(check.name for check in self.checks) + "-"
        return f"{self.implementation.name}-{extra}{self.case.id}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """The jobs of a run, and the coverage of its grids."""

    jobs: tuple[Job, ...]
    coverage: tuple[dict[str, Any], ...]


def plan(
    implementations: Sequence[Implementation],
    *,
    level: str,
    seeds: Sequence[int] = (0,),
    query: str | None = None,
    checks: Iterable[Check] = CHECKS,
) -> Plan:
    """The jobs that judge `implementations` at `level`.

    Args:
      implementations: what to judge.
      level: `quick`, `standard` or `deep`.
      seeds: base seeds; the grid is judged once for each.
      query: only cases that it matches.
      checks: only these checks.
    """
    chosen = tuple(checks)
    jobs: list[Job] = []
    coverage = []
    for implementation in implementations:
        made = [_jobs(implementation, level, seed, chosen, first=seed == seeds[0]) for seed in seeds]
        coverage.append(made[0][1])
        # The same row with every seed in turn: cases that differ only in values share compiled functions.
        rows = itertools.zip_longest(*(row for row, _ in made))
        jobs += [job for row in rows for job in row if job and (query is None or matches(query, job.case.id))]
    return Plan(tuple(jobs), tuple(coverage))


def _jobs(
    implementation: Implementation, level: str, seed: int, checks: tuple[Check, ...], *, first: bool
) -> tuple[list[Job], dict[str, Any]]:
    asked = Asked(implementation, level, seed)
    found = asked.grid
    jobs = []
    for scope in SCOPES:
        theirs = tuple(check for check in checks if check.scope is scope)
        if not theirs or not (first or scope.seeded):
            continue
        # At `quick` the cases of the grids take turns, unless what to ask is named.
        take_turns = level == "quick" and scope is GRID and len(checks) == len(CHECKS)
        turns: dict[Case, Turn] = {}
        if take_turns:
            turns = taken_by_sizes(implementation, asked.sizes, seed) | taken(implementation, found, seed)
        jobs += [Job(implementation, case, theirs, turns.get(case, EVERYTHING)) for case in scope.cases(asked)]
    row = {
        "implementation": implementation.name,
        "level": level,
        "strength": found.coverage.strength,
        "cases": len({*found.cases, *asked.sizes.cases}),
        "declined": len({*found.declined, *asked.sizes.declined}),
        "combinations": found.coverage.feasible + asked.sizes.coverage.feasible,
        "covered": found.coverage.covered + asked.sizes.coverage.covered,
    }
    return jobs, row


def regressions(implementations: Sequence[Implementation], checks: Iterable[Check] = CHECKS) -> Plan:
    """The jobs that judge the named regressions; what an implementation does not support is shown with its reason."""
    asked = tuple(check for check in checks if check.scope is GRID)
    return Plan(tuple(Job(i, regression.case, asked) for i in implementations for regression in REGRESSIONS), ())


def single(implementation: Implementation, case: Case, checks: Iterable[Check] = CHECKS) -> Plan:
    """The jobs that judge one case: the checks of the grid, or the refusal if the case is not supported.

    Checks that look at one case of their own are asked of this one too, if it is theirs or if they are named.
    """
    chosen = tuple(checks)
    supported = implementation.supports(case) is None
    named = len(chosen) < len(CHECKS)
    asked = Asked(implementation, "quick", case.seed)
    scopes = [
        scope
        for scope in SCOPES
        if scope.supported == supported and ((named and scope.any_case(implementation)) or scope.has(asked, case))
    ]
    theirs = tuple(check for check in chosen if check.scope in scopes)
    # A declined case is shown with its reason, whichever checks are asked for.
    return Plan((Job(implementation, case, theirs),) if theirs or not supported else (), ())
