"""What a run judges: jobs, each one implementation on one case under some checks."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from cases.case import Case, matches
from cases.grid import grid
from conformance.checks import CHECKS, Check
from conformance.contract import Implementation
from conformance.subject import PULLBACKS, Pullback


@dataclasses.dataclass(frozen=True)
class Job:
    """One implementation on one case under some checks, which share compiled functions and expectations."""

    implementation: Implementation
    case: Case
    checks: tuple[Check, ...]
    pullbacks: tuple[Pullback, ...] = PULLBACKS

    @property
    def on_grid(self) -> bool:
        """Whether it is a case of the covering grid under the checks that are asked of each."""
        return {check.scope for check in self.checks} == {"grid"}

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
        made = [_jobs(implementation, level, seed, chosen) for seed in seeds]
        coverage.append(made[0][1])
        # The same row with every seed in turn: cases that differ only in values share compiled functions.
        rows = itertools.zip_longest(*(row for row, _ in made))
        jobs += [job for row in rows for job in row if job and (query is None or matches(query, job.case.id))]
    return Plan(tuple(jobs), tuple(coverage))


def _jobs(
    implementation: Implementation, level: str, seed: int, checks: tuple[Check, ...]
) -> tuple[list[Job], dict[str, Any]]:
    found = grid(level, seed, implementation.supports)
    by_scope = {
        "grid": found.cases,
        "declined": found.declined,
        "feature": found.singles[1:],
        "base": found.singles[:1],
        "rich": found.rich,
    }
    jobs = []
    for scope, cases in by_scope.items():
        if asked := tuple(check for check in checks if check.scope == scope):
            jobs += [
                Job(implementation, case, asked, _pullbacks(implementation, case, level, checks)) for case in cases
            ]
    row = {
        "implementation": implementation.name,
        "level": level,
        "strength": found.coverage.strength,
        "cases": len(found.cases),
        "declined": len(found.declined),
        "combinations": found.coverage.feasible,
        "covered": found.coverage.covered,
    }
    return jobs, row


def _pullbacks(
    implementation: Implementation, case: Case, level: str, checks: tuple[Check, ...]
) -> tuple[Pullback, ...]:
    """Which calls get differentiated: at `quick` one of the two, by the case's id.

    Compiling is nearly all of the cost, and most kernels share one backward pass between the two calls.
    """
    both = {"gradients", "gradients_lse"} <= {check.name for check in checks}
    if level != "quick" or not both or "logsumexp" not in implementation.differentiable_residuals:
        return PULLBACKS
    return (PULLBACKS[zlib.crc32(case.id.encode()) % 2],)


def single(implementation: Implementation, case: Case, checks: Iterable[Check] = CHECKS) -> Plan:
    """The jobs that judge one case: the checks of the grid, or the refusal if the case is not supported."""
    chosen = tuple(checks)
    declined = implementation.supports(case) is not None
    scopes = ("declined",) if declined else ("grid", "feature", "base", "rich")
    asked = tuple(check for check in chosen if check.scope in scopes)
    # A declined case is shown with its reason, whichever checks are asked for.
    return Plan((Job(implementation, case, asked),) if asked or declined else (), ())
