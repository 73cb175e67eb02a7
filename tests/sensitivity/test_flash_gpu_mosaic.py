"""Bugs of the schedules of the Mosaic GPU forward kernel are seen, on one case of several tiles.

They are not in the bank: where a kernel is interpreted all that the gate asks takes minutes a bug.
"""

from __future__ import annotations

import pytest

from conformance.checks import BY_NAME
from conformance.judging import plan
from conformance.records import RED
from conformance.sensitivity import PlantedBug
from conformance.sensitivity.examination import without_second_looks
from tests.planted.computing.flash_gpu.mosaic import BUGS, CASE, scheduled
from tests.sensitivity.by_day import every
from tests.sensitivity.interpreted import assert_dies_by_what_it_shows

_CHECKS = [BY_NAME["interpreter"]]


@pytest.mark.parametrize("bug", every(len(BUGS), BUGS))
def test_a_bug_of_the_schedules_dies_by_what_it_shows(bug: PlantedBug) -> None:
    assert bug.trigger(CASE)
    assert_dies_by_what_it_shows(bug, plan.single(bug.build(), CASE, _CHECKS).jobs)


@pytest.mark.long
def test_the_kernel_without_a_bug_is_right_there_and_nothing_races() -> None:
    kernel = scheduled("impls.flash_gpu", "correct")
    found = without_second_looks().run(plan.single(kernel, CASE, _CHECKS).jobs)
    assert [record for record in found if record.verdict in RED] == []
    assert any(record.observable.startswith("races") for record in found)
    assert any(record.ratio is not None for record in found)
