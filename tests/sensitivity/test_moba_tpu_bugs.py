"""Test that bugs of the kernels for mixture of block attention are seen.

Two cases of several steps and blocks are judged. The bugs are not in the bank: for an interpreted kernel, the whole
gate takes minutes a bug.
"""

from __future__ import annotations

import dataclasses

import pytest

from cases.case import Case
from conformance.checks import CHECKS_BY_NAME
from conformance.execution import implementation_registry
from conformance.judging import run_plan
from reports.records import RED
from tests.bank import PlantedBug
from tests.bank.examination import create_single_look_runner
from tests.planted.computing.moba_tpu import BUGS, FEW, MANY
from tests.sensitivity.interpreted_bugs import assert_detected_as_declared
from tests.sensitivity.nightly_bugs import sample_by_stride

_CHECKS = ("forward", "residuals", "gradients", "interpreter")


@pytest.mark.parametrize("bug", sample_by_stride(len(BUGS), BUGS))
def test_a_bug_of_steps_dies_by_what_it_shows(bug: PlantedBug) -> None:
    kernel = bug.build()
    case = next(case for case in (MANY, FEW) if bug.trigger(case))
    jobs = (job for check in _CHECKS for job in run_plan.plan_case(kernel, case, [CHECKS_BY_NAME[check]]).jobs)
    assert_detected_as_declared(bug, jobs)


@pytest.mark.nightly
@pytest.mark.parametrize("case", [MANY, FEW, dataclasses.replace(MANY, dtype="bf16")], ids=lambda case: case.id)
def test_the_kernels_without_a_bug_are_right_there(case: Case) -> None:
    jobs = run_plan.plan_case(
        implementation_registry.find_implementation("moba_tpu"), case, [CHECKS_BY_NAME[check] for check in _CHECKS]
    ).jobs
    found = create_single_look_runner().run(jobs)
    assert [record for record in found if record.verdict in RED] == []
    assert {record.check for record in found if record.ratio is not None} == set(_CHECKS)
