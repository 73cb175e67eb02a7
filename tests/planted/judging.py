"""Which case and check kill a planted bug first."""

from __future__ import annotations

import dataclasses
import functools

from conformance import plan, runner, settings
from conformance.contract import Implementation
from conformance.plan import Job
from conformance.records import ERROR, RED, Record
from conformance.sensitivity import PlantedBug


def first_kill(bug: PlantedBug, level: str) -> list[Record]:
    """The red records of the first job of the grid that has any, cases with the bug's trigger first; none if none has.

    Jobs are judged one by one, so that a bug that dies early costs little.
    """
    judge = runner.Runner(settings.Settings()).judge
    for job in sorted(_jobs(bug.build(), level), key=lambda job: not bug.trigger(job.case)):
        if red := [record for record in judge(job) if record.verdict in RED]:
            return red
    return []


def shows_as_said(bug: PlantedBug, red: list[Record]) -> bool:
    """Whether one of the red records is of an observable that the bug says it shows by."""
    return any(_observable(record) in bug.shows for record in red)


def _observable(record: Record) -> str:
    return "error" if record.verdict == ERROR else record.observable.split(".")[0]


def _jobs(implementation: Implementation, level: str) -> list[Job]:
    if implementation.unsupported or implementation.supports_case or implementation.validates:
        return list(plan.plan([implementation], level=level).jobs)
    # The grid is the same for all that support everything, and takes longer to lay out than a case to judge.
    return [dataclasses.replace(job, implementation=implementation) for job in _jobs_of_everything(level)]


@functools.cache
def _jobs_of_everything(level: str) -> tuple[Job, ...]:
    def never_called() -> None:
        raise AssertionError

    return plan.plan([Implementation(name="everything", call=never_called)], level=level).jobs
