"""Test that jobs come in the order of what they tell for their cost, and that `smoke` is its beginning."""

from __future__ import annotations

import functools
from collections import Counter

import pytest

from cases.case_space.coarse_levels import find_coarse_levels
from cases.case_space.novelty import pair_marks
from cases.grid import STRENGTH, build_grid
from conformance.execution import implementation_registry
from conformance.execution.plain_functions import build_implementation
from conformance.judging import prioritization, run_plan
from conformance.judging.job import Job
from conformance.judging.run_levels import GRID_LEVELS, LEVELS
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from reports.page_model import build_summary
from reports.records import RED, RunInfo
from tests.kernels import naive

NAMES = ("dot_product", "splash_tpu", "ragged", "moba")


@functools.cache
def plan_jobs(name: str, level: str, seeds: tuple[int, ...] = (0,)) -> tuple[Job, ...]:
    return run_plan.plan_run([implementation_registry.find_implementation(name)], level=level, seeds=seeds).jobs


def list_subchecks(job: Job) -> list[tuple[str, str, object]]:
    return [(job.case.id, check.name, job.selection) for check in job.checks]


def test_levels_are_those_of_the_grid_and_one_below() -> None:
    assert tuple(STRENGTH) == GRID_LEVELS
    assert ("smoke", *GRID_LEVELS) == LEVELS


@pytest.mark.parametrize("name", NAMES)
def test_smoke_asks_nothing_that_quick_does_not(name: str) -> None:
    quick = {subcheck for job in plan_jobs(name, "quick") for subcheck in list_subchecks(job)}
    smoke = [subcheck for job in plan_jobs(name, "smoke") for subcheck in list_subchecks(job)]
    assert len(smoke) == len(set(smoke))
    assert set(smoke) < quick


@pytest.mark.parametrize("name", NAMES)
def test_quick_begins_with_the_cases_of_smoke_and_drops_nothing(name: str) -> None:
    quick, smoke = plan_jobs(name, "quick"), list(plan_jobs(name, "smoke"))
    last_on_grid = max(place for place, job in enumerate(smoke) if job.is_on_grid)
    begun = [list_subchecks(job) for job in smoke[: last_on_grid + 1]]
    first = [list_subchecks(job) for job in quick]
    first = first[: first.index(begun[-1]) + 1]
    further = [subchecks for subchecks in first if subchecks not in begun]
    assert [subchecks for subchecks in first if subchecks in begun] == begun
    assert len(further) <= 3  # with coarse levels that `smoke` lacks
    assert len({job.id for job in quick}) == len(quick)
    shuffled = prioritization.order_jobs(quick[::-1])
    assert Counter(job.id for job in shuffled) == Counter(job.id for job in quick)


@pytest.mark.parametrize("name", NAMES)
def test_the_calls_of_the_first_minute_come_among_the_first_jobs(name: str) -> None:
    for level in ("smoke", "quick"):
        jobs = plan_jobs(name, level)
        places = [place for place, job in enumerate(jobs) if "first_calls" in {check.name for check in job.checks}]
        programs = {job.case.program.rpartition("/")[0] for job in jobs[: places[0]]}
        assert len(places) == 1
        assert len(programs) <= 4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("level", ["smoke", "quick"])
def test_the_first_cases_have_every_coarse_level_between_them(name: str, level: str) -> None:
    on_grid = [job for job in plan_jobs(name, level) if job.is_on_grid]
    levels = [find_coarse_levels(job.case) for job in on_grid]
    assert frozenset().union(*levels[:10]) == frozenset().union(*levels)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_is_to_fail_fast_asks_every_check_early(name: str) -> None:
    jobs = plan_jobs(name, "quick")
    parts = prioritization.split_to_fail_fast(jobs)
    judged = sorted((job.case.id, check.name) for part, job in parts for check in part.checks)
    assert judged == sorted((job.case.id, check.name) for job in jobs for check in job.checks)
    assert all(set(part.checks) <= set(job.checks) and part.case == job.case for part, job in parts)
    assert parts[0][0].is_on_grid
    checks = {check.name for job in jobs for check in job.checks}
    early = [part for part, _ in parts[: 2 * len(checks)]]
    assert {check.name for part in early for check in part.checks} == checks
    assert sum(part.is_on_grid for part in early) >= len(early) // 2  # cases of the grid take turns with the others
    assert all(len(part.checks) == 1 for part in early if not part.short)


def test_every_program_of_the_order_says_most_for_its_cost_of_those_that_are_left() -> None:
    programs = prioritization.order_programs([job for job in plan_jobs("dot_product", "quick") if job.is_on_grid])
    met: set[str] = set()
    met_pairs: set[tuple[str, str]] = set()

    def worth(program: list[Job]) -> float:
        return prioritization.compute_value([(job.case, job.selection) for job in program], met, met_pairs)

    for place, program in enumerate(programs):
        assert worth(program) == max(map(worth, programs[place:]))
        for job in program:
            found = prioritization.collect_marks((job.case, job.selection))
            met |= found
            met_pairs |= pair_marks(found)


def test_cases_that_share_programs_stay_together_over_distributions_and_seeds() -> None:
    smoke = [job for job in plan_jobs("dot_product", "smoke", (0, 1)) if job.is_on_grid]
    programs = [job.case.program.rpartition("/")[0] for job in smoke]
    runs = [program for place, program in enumerate(programs) if programs[place - 1 : place] != [program]]
    assert len(runs) == len(set(runs)) == prioritization.SMOKE_PROGRAMS
    assert {job.case.seed for job in smoke} == {0, 1}


@pytest.mark.parametrize("name", NAMES)
def test_coverage_is_of_the_cases_that_are_planned(name: str) -> None:
    (smoke,), (quick,) = (
        run_plan.plan_run([implementation_registry.find_implementation(name)], level=level).coverage
        for level in ("smoke", "quick")
    )
    assert smoke["combinations"] == quick["combinations"] == quick["covered"]
    assert 0 < smoke["covered"] < quick["covered"]
    assert smoke["cases"] == sum(job.is_on_grid for job in plan_jobs(name, "smoke"))
    found = build_grid("quick", 0, implementation_registry.find_implementation(name).supports)
    assert found.count_covered_by(found.cases) == found.coverage.covered
    assert found.count_covered_by(found.cases[:1]) == len(found.varied) * (len(found.varied) - 1) // 2


def test_smoke_never_says_conforms() -> None:
    for name, function in (("right", naive.attention), ("wrong", lambda q, k, v: 1.02 * naive.attention(q, k, v))):
        implementation = build_implementation(function, name)
        found = Runner(Settings()).run(run_plan.plan_run([implementation], level="smoke").jobs[:3])
        run = RunInfo(command="", level="smoke", environment={}, tolerances=[])
        said = build_summary(found, run).headline
        assert "conforms" not in said
        assert (name == "wrong") == any(record.verdict in RED for record in found) == ("does not conform" in said)
