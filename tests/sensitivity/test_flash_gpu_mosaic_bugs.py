"""Test that bugs of the schedules of the Mosaic GPU kernels are seen, each on one case of several tiles.

They are not in the bank: for an interpreted kernel, the whole gate takes minutes a bug.
"""

from __future__ import annotations

from typing import Any

import pytest

from cases.case import Case
from conformance.checks import CHECKS_BY_NAME
from conformance.judging import run_plan
from reports.records import RED
from tests.bank import PlantedBug
from tests.bank.examination import create_single_look_runner
from tests.planted.computing.flash_gpu.mosaic import BUGS, CASE, DEEP_BUGS, DEEP_CASE, EARLY, LATE, scheduled
from tests.sensitivity.interpreted_bugs import assert_detected_as_declared
from tests.sensitivity.nightly_bugs import sample_by_stride

_CHECKS = [CHECKS_BY_NAME["interpreter"]]


_CASES = dict.fromkeys(BUGS, CASE) | dict.fromkeys(DEEP_BUGS, DEEP_CASE)


@pytest.mark.parametrize("bug", sample_by_stride(len(BUGS), (*BUGS, *DEEP_BUGS)))
def test_a_bug_of_the_schedules_dies_by_what_it_shows(bug: PlantedBug) -> None:
    case = _CASES[bug]
    assert bug.trigger(case)
    assert_detected_as_declared(bug, run_plan.plan_case(bug.build(), case, _CHECKS).jobs)


@pytest.mark.long
@pytest.mark.parametrize(("case", "options"), [(CASE, LATE), (CASE, EARLY), (DEEP_CASE, LATE)])
def test_the_kernel_without_a_bug_is_right_there_and_nothing_races(case: Case, options: dict[str, Any]) -> None:
    kernel = scheduled("impls.flash_gpu", "correct", options)
    found = create_single_look_runner().run(run_plan.plan_case(kernel, case, _CHECKS).jobs)
    assert [record for record in found if record.verdict in RED] == []
    assert any(record.observable.startswith("races") for record in found)
    assert any(record.ratio is not None for record in found)
