"""Tests that correct functions in users' styles have no failure: any failure is a false alarm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cases.case_id import parse_case_id
from conformance.check_api.scopes import DECODED, ENSEMBLE
from conformance.checks import CHECKS_BY_NAME
from conformance.execution.plain_functions import build_implementation
from conformance.judging import run_plan
from conformance.judging.declarations import list_declarations
from conformance.judging.job import Job
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from reports.records import PASS, RED, Record
from tests.kernels.orders import ORDERS
from tests.kernels.styles import STYLES

Style = Callable[..., Any]
# Of every third style, one of this many jobs of the quick grid runs by default. Each starts at another job.
_STRIDE = 42

_BY_DAY = STYLES[::3]


def plan_jobs(style: Style) -> list[Job]:
    return list(run_plan.plan_run([build_implementation(style, style.__name__)], level="quick").jobs)


def assert_no_alarm(found: list[Record]) -> None:
    assert [record for record in found if record.verdict in RED] == []
    assert any(record.verdict == PASS and record.ratio is not None for record in found)


@pytest.mark.long
@pytest.mark.parametrize("style", _BY_DAY, ids=lambda style: style.__name__)
def test_a_style_has_no_failure_on_a_part_of_the_grid(style: Style) -> None:
    jobs = [job for job in plan_jobs(style) if job.is_on_grid]
    assert_no_alarm(Runner(Settings()).run(jobs[STYLES.index(style) :: _STRIDE]))


@pytest.mark.long
@pytest.mark.parametrize(
    "style", [style for style in STYLES if list_declarations(build_implementation(style, "style"))[1:]][::3]
)
def test_what_is_declared_covers_the_statistics_over_many_roundings(style: Style) -> None:
    jobs = [job for job in plan_jobs(style) if has_scope(job, ENSEMBLE)]
    assert_no_alarm(Runner(Settings()).run([jobs[STYLES.index(style) % len(jobs)]]))


@pytest.mark.parametrize("style", STYLES[1:2], ids=lambda style: style.__name__)
def test_rows_that_average_a_cache_are_not_judged_by_what_lies_behind_its_end(style: Style) -> None:
    assert build_implementation(style, "kernel").empty_rows == "mean"
    assert_no_alarm(Runner(Settings()).run([job for job in plan_jobs(style) if has_scope(job, DECODED)]))


def test_heads_of_a_group_may_overflow_where_their_sum_does_not() -> None:
    """In f16, 16 times the gradients overflow in single heads of a group, but not in their sum."""
    broadcast = next(style for style in STYLES if style.__name__ == "broadcast")
    case = parse_case_id("train/f16/B1.T2304.S128.N2.K1.H32.V32/lengths-65/segwild/levels/s7")
    planned = run_plan.plan_case(build_implementation(broadcast, "broadcast"), case, [CHECKS_BY_NAME["linearity"]])
    assert_no_alarm(Runner(Settings()).run(planned.jobs))


def has_scope(job: Job, scope: object) -> bool:
    return any(check.scope is scope for check in job.checks)


@pytest.mark.nightly
@pytest.mark.parametrize("style", [*STYLES, *ORDERS], ids=lambda style: style.__name__)
def test_a_style_has_no_failure_at_quick(style: Style) -> None:
    assert_no_alarm(Runner(Settings()).run(plan_jobs(style)))
