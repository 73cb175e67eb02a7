"""Test that bugs of the schedules of the Mosaic GPU forward kernel are seen, on one case of several tiles.

They are not in the bank: for an interpreted kernel, the whole gate takes minutes a bug.
"""

from __future__ import annotations

import pytest

from conformance.checks import CHECKS_BY_NAME
from conformance.judging import run_plan
from conformance.records import RED
from conformance.sensitivity import PlantedBug
from conformance.sensitivity.examination import create_single_look_runner
from tests.planted.computing.flash_gpu.mosaic import BUGS, CASE, scheduled
from tests.sensitivity.interpreted_bugs import assert_detected_as_declared
from tests.sensitivity.nightly_bugs import sample_by_stride

_CHECKS = [CHECKS_BY_NAME["interpreter"]]


@pytest.mark.parametrize("bug", sample_by_stride(len(BUGS), BUGS))
def test_a_bug_of_the_schedules_dies_by_what_it_shows(bug: PlantedBug) -> None:
    assert bug.trigger(CASE)
    assert_detected_as_declared(bug, run_plan.plan_case(bug.build(), CASE, _CHECKS).jobs)


@pytest.mark.long
def test_the_kernel_without_a_bug_is_right_there_and_nothing_races() -> None:
    kernel = scheduled("impls.flash_gpu", "correct")
    found = create_single_look_runner().run(run_plan.plan_case(kernel, CASE, _CHECKS).jobs)
    assert [record for record in found if record.verdict in RED] == []
    assert any(record.observable.startswith("races") for record in found)
    assert any(record.ratio is not None for record in found)
