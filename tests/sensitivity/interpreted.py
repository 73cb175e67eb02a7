"""How a bug is seen of a kernel that is interpreted: by a few jobs, for all that the gate asks takes minutes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from conformance.checks import BY_NAME
from conformance.contract import Implementation
from conformance.judging import plan
from conformance.judging.job import Job
from conformance.records import RED
from conformance.sensitivity import PlantedBug
from conformance.sensitivity.examination import shows_as_said, without_second_looks


def near(bug: PlantedBug, kernel: Implementation, checks: Iterable[str], *, cases: int) -> Iterator[Job]:
    """The first jobs of each check of `quick` on cases that have what the bug is about."""
    for check in checks:
        jobs = plan.plan([kernel], level="quick", checks=[BY_NAME[check]]).jobs
        yield from [job for job in jobs if bug.trigger(job.case)][:cases]


def assert_dies_by_what_it_shows(bug: PlantedBug, jobs: Iterable[Job]) -> None:
    """Fails unless one of the jobs, asked in turn, is red by what the bug says it shows."""
    seen: set[str] = set()
    runner = without_second_looks()
    for job in jobs:
        for record in runner.stream(job):
            if record.verdict in RED:
                if shows_as_said(bug, record):
                    return
                seen.add(f"{record.check}/{record.observable}")
    pytest.fail(f"survives, or dies by {sorted(seen)} only and not by {bug.shows}")
