"""Bugs of packed sequences in the splash kernels are seen, on one case of several blocks each way.

They are not in the bank: nearly all packs of the grid fit into one block of 128, and where a kernel is interpreted all
that the gate asks takes minutes a bug.
"""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet

from conformance.checks import BY_NAME
from conformance.judging import plan
from conformance.records import RED
from conformance.sensitivity import PlantedBug
from conformance.sensitivity.examination import shows_as_said, without_second_looks
from impls import splash_tpu
from tests.planted.computing.splash_packed import BUGS, CASE

_CHECKS = ("forward", "residuals", "gradients")


def _asked(number: int, bug: PlantedBug) -> ParameterSet:
    """A bug for the bank, where each takes ten seconds: the first, and the others at night."""
    return pytest.param(bug, id=bug.name, marks=pytest.mark.nightly if number else pytest.mark.bank)


@pytest.mark.parametrize("bug", [_asked(*each) for each in enumerate(BUGS)])
def test_a_bug_of_packs_dies_by_what_it_shows(bug: PlantedBug) -> None:
    kernel, seen = bug.build(), set[str]()
    assert bug.trigger(CASE)
    for check in _CHECKS:
        for record in without_second_looks().run(plan.single(kernel, CASE, [BY_NAME[check]]).jobs):
            if record.verdict in RED:
                if shows_as_said(bug, record):
                    return
                seen.add(f"{record.check}/{record.observable}")
    pytest.fail(f"survives, or dies by {sorted(seen)} only and not by {bug.shows}")


@pytest.mark.nightly
def test_the_kernels_without_a_bug_are_right_there() -> None:
    kernel = splash_tpu.packed_implementation("correct")
    found = without_second_looks().run(plan.single(kernel, CASE, [BY_NAME[check] for check in _CHECKS]).jobs)
    assert [record for record in found if record.verdict in RED] == []
    assert {record.check for record in found if record.ratio is not None} == set(_CHECKS)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_passage_that_a_bug_changes_is_there(bug: PlantedBug) -> None:
    assert bug.build().name == bug.name
