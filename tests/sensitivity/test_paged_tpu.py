"""Bugs of a paged kernel that copies its pages by itself are seen, by the interpreter that looks for races or by truth.

They are not in the bank: all that the gate asks takes minutes a bug where a kernel is interpreted.
"""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet

from conformance.checks import BY_NAME
from conformance.judging import plan
from conformance.records import RED
from conformance.sensitivity import PlantedBug
from conformance.sensitivity.examination import shows_as_said, without_second_looks
from tests.planted.computing.paged_tpu import BUGS

_AT_NIGHT = 10
_NEAR = 2  # cases of each check, of those that have what a bug is about


def _asked(number: int, bug: PlantedBug) -> ParameterSet:
    """A bug for the bank, where each takes ten seconds: every tenth, and the others at night."""
    return pytest.param(bug, id=bug.name, marks=pytest.mark.nightly if number % _AT_NIGHT else pytest.mark.bank)


@pytest.mark.parametrize("bug", [_asked(*each) for each in enumerate(BUGS)])
def test_a_bug_of_copies_dies_by_what_it_shows(bug: PlantedBug) -> None:
    kernel = bug.build()
    seen: set[str] = set()
    for check in ("interpreter", "forward"):
        jobs = plan.plan([kernel], level="quick", checks=[BY_NAME[check]]).jobs
        for record in without_second_looks().run([job for job in jobs if bug.trigger(job.case)][:_NEAR]):
            if record.verdict in RED:
                if shows_as_said(bug, record):
                    return
                seen.add(f"{record.check}/{record.observable}")
    pytest.fail(f"survives, or dies by {sorted(seen)} only and not by {bug.shows}")
