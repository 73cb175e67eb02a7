"""Define the one test of the pytest gate, which judges one job.

Run it with `pytest --pyargs conformance --impl=my.module:attention`.

`conformance.pytest_plugin` parametrizes the test with the planned jobs.
"""

from __future__ import annotations

from collections.abc import Callable

from conformance.gate.outcome import report_outcome
from conformance.judging.job import Job
from reports.records import Record


def test_conforms(conformance_job: Job, conformance_judge: Callable[[Job], list[Record]]) -> None:
    """Judge a job, and fail if an observable exceeds its limit or an unsupported feature is not refused."""
    report_outcome(conformance_judge(conformance_job))
