"""Plan the jobs of a run: pair the cases that each implementation supports with the checks that judge them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cases.case import Case
from cases.case_id import matches_query
from cases.regressions import REGRESSIONS
from conformance.check_api.branch_search_request import BranchSearch
from conformance.check_api.scopes import FRONT, GRID, SCOPES, SEARCHED, ImplementationGrids
from conformance.check_api.subchecks import ALL_SUBCHECKS, Subchecks
from conformance.checks import CHECKS, Check
from conformance.judging import prioritization
from conformance.judging.job import Job
from conformance.judging.run_levels import get_grid_level
from conformance.judging.subcheck_assignment import assign_size_subchecks, assign_subchecks
from impls.contract.implementation import Implementation
from reports.records import CoveringArraySize


@dataclasses.dataclass(frozen=True)
class CoveringArrays:
    """The covering arrays of an implementation and the rows of its cases.

    Attributes:
      arrays: the strength and number of combinations of each array.
      rows: for each case id, the case's row in each array, one character for each axis; empty if it has none.
      declined: number of unsupported cases whose refusal is checked, one for each unsupported level of a feature.
      parted: counts over pairs of an operand and a mask that the implementation supports singly: the pairs that it does
        not support together, and all pairs.
    """

    arrays: tuple[CoveringArraySize, ...]
    rows: Mapping[str, tuple[str, ...]]
    declined: int
    parted: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The jobs of a run, and how much of the covering arrays they cover.

    Attributes:
      jobs: the jobs, in the order in which they are judged.
      coverage: how much of the covering arrays the cases cover, one table row for each implementation.
      arrays: the covering arrays of each implementation, by its name.
      whole: number of jobs of each implementation, by its name, before a query narrows the cases.
    """

    jobs: tuple[Job, ...]
    coverage: tuple[dict[str, Any], ...]
    arrays: Mapping[str, CoveringArrays] = dataclasses.field(default_factory=dict)
    whole: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def find_rows(self, job: Job) -> tuple[str, ...]:
        """Return the rows of a job's case in the covering arrays; empty if it is not on the grid."""
        arrays = self.arrays.get(job.implementation.name)
        return arrays.rows.get(job.case.id, ()) if arrays is not None and job.is_on_grid else ()


def plan_run(
    implementations: Sequence[Implementation],
    *,
    level: str,
    seeds: Sequence[int] = (0,),
    query: str | None = None,
    checks: Iterable[Check] = CHECKS,
    packages: Sequence[str] = (),
) -> Plan:
    """Plan the jobs that judge `implementations` at `level`.

    Args:
      implementations: the implementations to judge.
      level: one of `LEVELS`.
      seeds: base seeds. The grid is judged once for each.
      query: judge only cases that this query matches; None for all.
      checks: run only these checks.
      packages: packages whose branches are searched besides those of the kernel's folder.
    """
    chosen = tuple(checks)
    jobs: list[Job] = []
    coverage = []
    arrays: dict[str, CoveringArrays] = {}
    whole: dict[str, int] = {}
    for implementation in implementations:
        grids = [ImplementationGrids(implementation, get_grid_level(level), seed) for seed in seeds]
        jobs_by_seed = [_build_jobs(each, chosen, first=each is grids[0]) for each in grids]
        # Put jobs that differ only in the seed next to each other: they share compiled functions.
        jobs_by_row = itertools.zip_longest(*jobs_by_seed)
        its_jobs = [job for row in jobs_by_row for job in row if job]
        its_jobs = (
            prioritization.select_smoke_jobs(its_jobs) if level == "smoke" else prioritization.order_jobs(its_jobs)
        )
        its_jobs = _add_branch_search(its_jobs, grids[0], packages, beyond_numbers=level != "smoke")
        coverage.append(_measure_coverage(grids[0], level, its_jobs))
        arrays[implementation.name] = _build_arrays(grids)
        whole[implementation.name] = len(its_jobs)
        jobs += [job for job in its_jobs if query is None or matches_query(query, job.case.id)]
    return Plan(tuple(jobs), tuple(coverage), arrays, whole)


def _add_branch_search(
    jobs: Sequence[Job], grids: ImplementationGrids, packages: Sequence[str], *, beyond_numbers: bool
) -> list[Job]:
    """Give the job that searches branches the cases of the grid that are judged; all of the level if none are."""
    cases = [job.case for job in jobs if job.is_on_grid] or [case for grid in grids.all_grids for case in grid.cases]
    search = BranchSearch(tuple(dict.fromkeys(case.id for case in cases)), tuple(packages), beyond_numbers)
    return [
        dataclasses.replace(job, branch_search=search) if any(check.scope is SEARCHED for check in job.checks) else job
        for job in jobs
    ]


def select_shard(planned: Sequence[Job], shard: int, shards: int) -> tuple[Job, ...]:
    """Select the jobs of one shard, counted from 1. Cases that share compiled programs go to the same shard."""
    programs = list(dict.fromkeys(_get_program_key(job) for job in planned))
    selected = set(programs[shard - 1 :: shards])
    return tuple(job for job in planned if _get_program_key(job) in selected)


def _get_program_key(job: Job) -> tuple[str, str]:
    """Return the key of the programs that a job compiles. Jobs that differ only in the seed have the same key."""
    return (job.implementation.name, job.case.program.rpartition("/")[0])


def _build_arrays(grids_by_seed: Sequence[ImplementationGrids]) -> CoveringArrays:
    """Collect the covering arrays of an implementation.

    Grids of different seeds have the same rows, but other cases.
    """
    pairs = [(each.grid, each.sizes) for each in grids_by_seed]
    rows: dict[str, tuple[str, ...]] = {}
    for pair in pairs:
        for position, grid in enumerate(pair):
            for case, row in zip(grid.cases, grid.rows, strict=True):
                case_rows = list(rows.get(case.id, ("",) * len(pair)))
                case_rows[position] = "".join(chr(ord("0") + row[axis]) for axis in grid.varied)
                rows[case.id] = tuple(case_rows)
    first = pairs[0]
    return CoveringArrays(
        tuple(
            CoveringArraySize(strength=grid.coverage.strength, combinations=grid.coverage.feasible) for grid in first
        ),
        rows,
        len(grids_by_seed[0].declined),
        first[0].parted,
    )


def _build_jobs(grids: ImplementationGrids, checks: tuple[Check, ...], *, first: bool) -> list[Job]:
    """Build the jobs of an implementation for one seed.

    Checks that do not depend on the seed are planned for the first seed only.
    """
    implementation, seed = grids.implementation, grids.seed
    jobs = []
    for scope in SCOPES:
        scope_checks = tuple(check for check in checks if check.scope is scope)
        if not scope_checks or not (first or scope.seeded):
            continue
        # At `quick`, each case of the grids gets some of the costly subchecks, unless the user named checks.
        takes_turns = grids.level == "quick" and scope is GRID and len(checks) == len(CHECKS)
        selections: dict[Case, Subchecks] = {}
        if takes_turns:
            selections = assign_size_subchecks(implementation, grids.sizes, seed)
            for grid in (*grids.operand_grids, grids.grid):
                selections |= assign_subchecks(implementation, grid, seed)
        jobs += [
            Job(implementation, case, scope_checks, selections.get(case, ALL_SUBCHECKS))
            for case in dict.fromkeys(scope.cases(grids))  # grids may have the same plainest case
        ]
    return jobs


def _measure_coverage(implementation_grids: ImplementationGrids, level: str, jobs: Iterable[Job]) -> dict[str, Any]:
    """Measure how many combinations of levels the planned cases of the grids cover: all cases, except at `smoke`."""
    chosen = {job.case for job in jobs if job.is_on_grid} if level == "smoke" else None
    grids = implementation_grids.all_grids
    return {
        "implementation": implementation_grids.implementation.name,
        "level": level,
        "strength": implementation_grids.grid.coverage.strength,
        "cases": len({case for grid in grids for case in grid.cases if chosen is None or case in chosen}),
        "declined": len(implementation_grids.declined),
        "combinations": sum(grid.coverage.feasible for grid in grids),
        "covered": sum(grid.coverage.covered if chosen is None else grid.count_covered_by(chosen) for grid in grids),
    }


def plan_regressions(implementations: Sequence[Implementation], checks: Iterable[Check] = CHECKS) -> Plan:
    """Plan the named regression cases. Unsupported ones are planned too, so that records give the reason."""
    grid_checks = tuple(check for check in checks if check.scope is GRID)
    return Plan(tuple(Job(i, regression.case, grid_checks) for i in implementations for regression in REGRESSIONS), ())


def plan_problem(
    implementations: Sequence[Implementation], cases: Sequence[Case], checks: Iterable[Check] = CHECKS
) -> Plan:
    """Plan the cases of a named problem.

    A case with a front end (norms, rotary embedding) gets the checks of front ends, any other case those of the grid.
    """
    chosen = tuple(checks)
    by_scope = {scope: tuple(check for check in chosen if check.scope is scope) for scope in (FRONT, GRID)}
    return Plan(
        tuple(Job(i, case, by_scope[FRONT if case.steps else GRID]) for i in implementations for case in cases), ()
    )


def plan_case(
    implementation: Implementation, case: Case, checks: Iterable[Check] = CHECKS, selection: Subchecks = ALL_SUBCHECKS
) -> Plan:
    """Plan one case: the checks of the grid, or the checks of refusals if the case is not supported.

    Checks with cases of their own are run too if this is one of their cases, or if `checks` names them and they accept
    any case.

    Args:
      implementation: the implementation to judge.
      case: the case.
      checks: the checks to choose from.
      selection: the costly subchecks that run on the case.
    """
    chosen = tuple(checks)
    supported = implementation.supports(case) is None
    are_named = len(chosen) < len(CHECKS)
    grids = ImplementationGrids(implementation, "quick", case.seed)
    scopes = [
        scope
        for scope in SCOPES
        if scope.supported == supported
        and (
            (are_named and case.dropout_rate is None and scope.accepts_any_case(implementation))
            or scope.contains(grids, case)
        )
    ]
    case_checks = tuple(check for check in chosen if check.scope in scopes)
    # An unsupported case is planned whichever checks are named, so that a record gives the reason.
    return Plan((Job(implementation, case, case_checks, selection),) if case_checks or not supported else (), ())
