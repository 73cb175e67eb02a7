"""Test that bugs of packed sequences in the GPU flash kernels are seen.

Two cases of several blocks each way are judged. The bugs are not in the bank: for an interpreted kernel, the whole gate
takes minutes a bug.
"""

from __future__ import annotations

import pytest

from cases.case import Case
from conformance.checks import CHECKS_BY_NAME
from conformance.judging import run_plan
from impls import flash_gpu
from reports.records import RED
from tests.bank import PlantedBug
from tests.bank.examination import create_single_look_runner
from tests.planted.computing.flash_gpu.packed import BUGS, CASE, CAUSAL
from tests.sensitivity.interpreted_bugs import assert_detected_as_declared
from tests.sensitivity.nightly_bugs import sample_by_stride

_CHECKS = ("forward", "residuals", "gradients")


@pytest.mark.parametrize("bug", sample_by_stride(len(BUGS), BUGS))
def test_a_bug_of_packs_dies_by_what_it_shows(bug: PlantedBug) -> None:
    kernel = bug.build()
    assert bug.trigger(CASE)
    assert bug.trigger(CAUSAL)
    cases = ((case, check) for check in _CHECKS for case in (CASE, CAUSAL))
    assert_detected_as_declared(
        bug, (job for case, check in cases for job in run_plan.plan_case(kernel, case, [CHECKS_BY_NAME[check]]).jobs)
    )


@pytest.mark.nightly
@pytest.mark.parametrize("case", [CASE, CAUSAL], ids=["window", "causal"])
def test_the_kernels_without_a_bug_are_right_there(case: Case) -> None:
    kernel = flash_gpu.build_packed_implementation("correct", on_gpu=False)
    found = create_single_look_runner().run(
        run_plan.plan_case(kernel, case, [CHECKS_BY_NAME[check] for check in _CHECKS]).jobs
    )
    assert [record for record in found if record.verdict in RED] == []
    assert {record.check for record in found if record.ratio is not None} == set(_CHECKS)
