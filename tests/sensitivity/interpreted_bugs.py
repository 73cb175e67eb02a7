"""Show that a bug of an interpreted kernel is seen, by a few jobs: the whole gate would take minutes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from conformance.checks import CHECKS_BY_NAME
from conformance.judging import run_plan
from conformance.judging.job import Job
from impls.contract.implementation import Implementation
from reports.records import RED
from tests.bank import PlantedBug
from tests.bank.examination import create_single_look_runner, shows_as_declared


def iter_near_jobs(bug: PlantedBug, kernel: Implementation, checks: Iterable[str], *, cases: int) -> Iterator[Job]:
    """Yield the first jobs of each check of `quick` on cases with the bug's trigger."""
    for check in checks:
        jobs = run_plan.plan_run([kernel], level="quick", checks=[CHECKS_BY_NAME[check]]).jobs
        yield from [job for job in jobs if bug.trigger(job.case)][:cases]


def assert_detected_as_declared(bug: PlantedBug, jobs: Iterable[Job]) -> None:
    """Fail unless one of the jobs, in order, is red in an observable that the bug declares."""
    seen: set[str] = set()
    runner = create_single_look_runner()
    for job in jobs:
        for record in runner.stream(job):
            if record.verdict in RED:
                if shows_as_declared(bug, record):
                    return
                seen.add(f"{record.check}/{record.observable}")
    pytest.fail(f"survives, or dies by {sorted(seen)} only and not by {bug.shows}")
