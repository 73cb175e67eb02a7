"""Bugs of a paged kernel whose programs share the keys of a sequence are seen, in the interpreter.

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
from tests.planted.computing.paged_gpu import BUGS

_NEAR = 3  # cases of each check, of those that have what a bug is about


def _asked(number: int, bug: PlantedBug) -> ParameterSet:
    """A bug for the bank, where each takes seconds: the first, and the others at night."""
    return pytest.param(bug, id=bug.name, marks=pytest.mark.nightly if number else pytest.mark.bank)


@pytest.mark.parametrize("bug", [_asked(*each) for each in enumerate(BUGS)])
def test_a_bug_of_shares_dies_by_what_it_shows(bug: PlantedBug) -> None:
    kernel = bug.build()
    seen: set[str] = set()
    for check in ("forward", "residuals"):
        jobs = plan.plan([kernel], level="quick", checks=[BY_NAME[check]]).jobs
        for record in without_second_looks().run([job for job in jobs if bug.trigger(job.case)][:_NEAR]):
            if record.verdict in RED:
                if shows_as_said(bug, record):
                    return
                seen.add(f"{record.check}/{record.observable}")
    pytest.fail(f"survives, or dies by {sorted(seen)} only and not by {bug.shows}")


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_passage_that_a_bug_changes_is_there(bug: PlantedBug) -> None:
    assert bug.build().name == bug.name
