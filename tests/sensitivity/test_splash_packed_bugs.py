"""Test that bugs of packed sequences in the splash kernels are seen, on one case of several blocks each way.

They are not in the bank: nearly all packs of the grid fit into one block of 128. For an interpreted kernel, the whole
gate takes minutes a bug.
"""

from __future__ import annotations

import pytest

from conformance.checks import CHECKS_BY_NAME
from conformance.judging import run_plan
from impls import splash_tpu
from reports.records import RED
from tests.bank import PlantedBug
from tests.bank.examination import create_single_look_runner
from tests.planted.computing.splash_packed import BUGS, CASE
from tests.sensitivity.interpreted_bugs import assert_detected_as_declared
from tests.sensitivity.nightly_bugs import sample_by_stride

_CHECKS = ("forward", "residuals", "gradients")


@pytest.mark.parametrize("bug", sample_by_stride(len(BUGS), BUGS))
def test_a_bug_of_packs_dies_by_what_it_shows(bug: PlantedBug) -> None:
    kernel = bug.build()
    assert bug.trigger(CASE)
    jobs = (job for check in _CHECKS for job in run_plan.plan_case(kernel, CASE, [CHECKS_BY_NAME[check]]).jobs)
    assert_detected_as_declared(bug, jobs)


@pytest.mark.nightly
def test_the_kernels_without_a_bug_are_right_there() -> None:
    kernel = splash_tpu.build_packed_implementation("correct")
    found = create_single_look_runner().run(
        run_plan.plan_case(kernel, CASE, [CHECKS_BY_NAME[check] for check in _CHECKS]).jobs
    )
    assert [record for record in found if record.verdict in RED] == []
    assert {record.check for record in found if record.ratio is not None} == set(_CHECKS)
