"""What a run judges, planned from what an implementation supports."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cases.case import Case, matches_query
from cases.regressions import REGRESSIONS
from conformance.check_api.rotation import FULL_ROTATION, Rotation
from conformance.check_api.scopes import FRONT, GRID, SCOPES, ImplementationGrids
from conformance.checks import CHECKS, Check
from conformance.contract import Implementation
from conformance.judging import prioritization
from conformance.judging.job import Job
from conformance.judging.rotation_assignment import assign_rotations, assign_size_rotations
from conformance.runs import CoveringArraySize


@dataclasses.dataclass(frozen=True)
class CoveringArrays:
    """The covering arrays of an implementation, the row of each case in each, and how much of them it declines."""

    arrays: tuple[CoveringArraySize, ...]
    rows: Mapping[str, tuple[str, ...]]
    declined: int
    parted: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The jobs of a run, the coverage of its grids and their rows.

    `whole` is how many jobs each implementation has where no query of cases narrows them.
    """

    jobs: tuple[Job, ...]
    coverage: tuple[dict[str, Any], ...]
    arrays: Mapping[str, CoveringArrays] = dataclasses.field(default_factory=dict)
    whole: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def find_rows(self, job: Job) -> tuple[str, ...]:
        """The rows of a job's case in the arrays; none of a job that is not on the grid."""
        arrays = self.arrays.get(job.implementation.name)
        return arrays.rows.get(job.case.id, ()) if arrays is not None and job.is_on_grid else ()


def plan_run(
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
      level: one of `LEVELS`.
      seeds: base seeds; the grid is judged once for each.
      query: only cases that it matches.
      checks: only these checks.
    """
    chosen = tuple(checks)
    jobs: list[Job] = []
    coverage = []
    arrays: dict[str, CoveringArrays] = {}
    whole: dict[str, int] = {}
    for implementation in implementations:
        asked = [ImplementationGrids(implementation, "quick" if level == "smoke" else level, seed) for seed in seeds]
        made = [_build_jobs(each, chosen, first=each is asked[0]) for each in asked]
        # The same row with every seed in turn: cases that differ only in values share compiled functions.
        rows = itertools.zip_longest(*made)
        theirs = [job for row in rows for job in row if job]
        theirs = prioritization.select_smoke_jobs(theirs) if level == "smoke" else prioritization.order_jobs(theirs)
        coverage.append(_measure_coverage(asked[0], level, theirs))
        arrays[implementation.name] = _build_arrays(asked)
        whole[implementation.name] = len(theirs)
        jobs += [job for job in theirs if query is None or matches_query(query, job.case.id)]
    return Plan(tuple(jobs), tuple(coverage), arrays, whole)


def select_shard(planned: Sequence[Job], shard: int, shards: int) -> tuple[Job, ...]:
    """The jobs of one of so many shards, from 1 on: cases that share compiled programs go to one of them."""
    programs = list(dict.fromkeys(_get_program_key(job) for job in planned))
    mine = set(programs[shard - 1 :: shards])
    return tuple(job for job in planned if _get_program_key(job) in mine)


def _get_program_key(job: Job) -> tuple[str, str]:
    return (job.implementation.name, job.case.program.rpartition("/")[0])


def _build_arrays(asked: Sequence[ImplementationGrids]) -> CoveringArrays:
    """The arrays of an implementation; with another seed, rows are the same and cases are others."""
    pairs = [(each.grid, each.sizes) for each in asked]
    rows: dict[str, tuple[str, ...]] = {}
    for pair in pairs:
        for place, made in enumerate(pair):
            for case, row in zip(made.cases, made.rows, strict=True):
                found = list(rows.get(case.id, ("",) * len(pair)))
                found[place] = "".join(chr(ord("0") + row[axis]) for axis in made.varied)
                rows[case.id] = tuple(found)
    first = pairs[0]
    return CoveringArrays(
        tuple(
            CoveringArraySize(strength=made.coverage.strength, combinations=made.coverage.feasible) for made in first
        ),
        rows,
        len({case for made in first for case in made.declined}),
        first[0].parted,
    )


def _build_jobs(asked: ImplementationGrids, checks: tuple[Check, ...], *, first: bool) -> list[Job]:
    implementation, seed = asked.implementation, asked.seed
    jobs = []
    for scope in SCOPES:
        theirs = tuple(check for check in checks if check.scope is scope)
        if not theirs or not (first or scope.seeded):
            continue
        # At `quick` the cases of the grids take turns, unless what to ask is named.
        take_turns = asked.level == "quick" and scope is GRID and len(checks) == len(CHECKS)
        turns: dict[Case, Rotation] = {}
        if take_turns:
            turns = assign_size_rotations(implementation, asked.sizes, seed) | assign_rotations(
                implementation, asked.grid, seed
            )
        jobs += [Job(implementation, case, theirs, turns.get(case, FULL_ROTATION)) for case in scope.cases(asked)]
    return jobs


def _measure_coverage(asked: ImplementationGrids, level: str, jobs: Iterable[Job]) -> dict[str, Any]:
    """What the cases of the grids cover: all of them but at `smoke`."""
    chosen = {job.case for job in jobs if job.is_on_grid} if level == "smoke" else None
    grids = (asked.grid, asked.sizes)
    return {
        "implementation": asked.implementation.name,
        "level": level,
        "strength": asked.grid.coverage.strength,
        "cases": len({case for grid in grids for case in grid.cases if chosen is None or case in chosen}),
        "declined": len({case for grid in grids for case in grid.declined}),
        "combinations": sum(grid.coverage.feasible for grid in grids),
        "covered": sum(grid.coverage.covered if chosen is None else grid.count_covered_by(chosen) for grid in grids),
    }


def plan_regressions(implementations: Sequence[Implementation], checks: Iterable[Check] = CHECKS) -> Plan:
    """The jobs that judge the named regressions; what an implementation does not support is shown with its reason."""
    asked = tuple(check for check in checks if check.scope is GRID)
    return Plan(tuple(Job(i, regression.case, asked) for i in implementations for regression in REGRESSIONS), ())


def plan_problem(
    implementations: Sequence[Implementation], cases: Sequence[Case], checks: Iterable[Check] = CHECKS
) -> Plan:
    """The jobs that judge cases of a named problem: those with a front end as a whole, the others as the grid is."""
    chosen = tuple(checks)
    asked = {scope: tuple(check for check in chosen if check.scope is scope) for scope in (FRONT, GRID)}
    return Plan(
        tuple(Job(i, case, asked[FRONT if case.steps else GRID]) for i in implementations for case in cases), ()
    )


def plan_case(
    implementation: Implementation, case: Case, checks: Iterable[Check] = CHECKS, turn: Rotation = FULL_ROTATION
) -> Plan:
    """The jobs that judge one case: the checks of the grid, or the refusal if the case is not supported.

    Checks that look at one case of their own are asked of this one too, if it is theirs or if they are named. `turn` is
    what the case is asked of what cases take turns with.
    """
    chosen = tuple(checks)
    supported = implementation.supports(case) is None
    named = len(chosen) < len(CHECKS)
    asked = ImplementationGrids(implementation, "quick", case.seed)
    scopes = [
        scope
        for scope in SCOPES
        if scope.supported == supported
        and ((named and scope.accepts_any_case(implementation)) or scope.has(asked, case))
    ]
    theirs = tuple(check for check in chosen if check.scope in scopes)
    # A declined case is shown with its reason, whichever checks are asked for.
    return Plan((Job(implementation, case, theirs, turn),) if theirs or not supported else (), ())
