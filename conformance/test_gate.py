"""Define the one test of the pytest gate, which judges one job.

Run it with `pytest --pyargs conformance --impl=my.module:attention`.

`conformance.pytest_plugin` parametrizes the test with the planned jobs.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conformance.judging.job import Job
from conformance.records import EXPECTED_FAIL, PASS, RED, UNJUDGED, UNSUPPORTED, Record


def test_conforms(conformance_job: Job, conformance_judge: Callable[[Job], list[Record]]) -> None:
    """Judge a job, and fail if an observable exceeds its limit or an unsupported feature is not refused."""
    found = conformance_judge(conformance_job)
    red = [record for record in found if record.verdict in RED]
    if red:
        pytest.fail("\n".join(describe_failure(record) for record in red), pytrace=False)
    if any(record.verdict == PASS for record in found):
        return
    if known := {record.reason for record in found if record.verdict == EXPECTED_FAIL}:
        pytest.xfail("; ".join(sorted(known)))
    reasons = {record.reason for record in found if record.verdict in (UNSUPPORTED, UNJUDGED)}
    pytest.skip("; ".join(sorted(reasons)) or "no check applies to this case")


def describe_failure(record: Record) -> str:
    """Describe one failure: case, observable, worst element, pattern, and the command that repeats it."""
    lines = [
        f"{record.implementation} ({record.platform}): {record.check} {record.observable} {record.verdict}",
        f"  case       {record.case}",
        f"  why        {record.reason}",
    ]
    if record.worst is not None:
        worst = record.worst
        lines.append(
            f"  worst      at {list(worst.index)}: got {worst.got:.9g}, expected {worst.expected:.9g}, "
            f"bound {worst.bound:.3g}, ratio {record.ratio:.3g} (limit {record.limit:g})"
        )
    if record.pattern:
        lines.append(f"  pattern    {record.pattern}")
    return "\n".join([*lines, f"  reproduce  {record.reproduce}"])
