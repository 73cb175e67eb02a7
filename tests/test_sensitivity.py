"""The gate sees small, realistic errors at `quick`, and passes the same kernel without them."""

from __future__ import annotations

import pytest

from conformance import plan, runner, settings
from conformance.plain import from_function
from conformance.records import FAIL, RED, Record
from tests.kernels.planted import SENSITIVITY, Steps, kernel

# A tenth of the grid, spread over it, on which the correct kernel must not fail.
_CORRECT_STRIDE = 10


def first_failure(steps: Steps) -> Record | None:
    """The first red record of the quick grid, in its order; None if the bug survives all of it."""
    implementation = from_function(kernel(steps), "planted")
    judge = runner.Runner(settings.Settings()).judge
    for job in plan.plan([implementation], level="quick").jobs:
        for record in judge(job):
            if record.verdict in RED:
                return record
    return None


@pytest.mark.parametrize("bug", SENSITIVITY)
def test_a_planted_bug_fails_at_quick(bug: str) -> None:
    record = first_failure(SENSITIVITY[bug])
    assert record is not None, f"{bug!r} survives the quick grid"
    assert record.verdict == FAIL
    assert record.ratio is not None
    assert record.limit is not None
    assert record.ratio > record.limit


def test_the_kernel_without_a_bug_passes() -> None:
    implementation = from_function(kernel(Steps()), "correct")
    jobs = plan.plan([implementation], level="quick").jobs[::_CORRECT_STRIDE]
    found = runner.Runner(settings.Settings()).run(jobs)
    assert [record for record in found if record.verdict in RED] == []
    assert any(record.ratio is not None for record in found)
