"""Bugs of the kernels for mixture of block attention are seen, on two cases of several steps and blocks.

They are not in the bank: where a kernel is interpreted all that the gate asks takes minutes a bug.
"""

from __future__ import annotations

import dataclasses

import pytest

from cases.case import Case
from conformance.calling import registry
from conformance.checks import BY_NAME
from conformance.judging import plan
from conformance.records import RED
from conformance.sensitivity import PlantedBug
from conformance.sensitivity.examination import without_second_looks
from tests.planted.computing.moba_tpu import BUGS, FEW, MANY
from tests.sensitivity.by_day import every
from tests.sensitivity.interpreted import assert_dies_by_what_it_shows

_CHECKS = ("forward", "residuals", "gradients", "interpreter")


@pytest.mark.parametrize("bug", every(len(BUGS), BUGS))
def test_a_bug_of_steps_dies_by_what_it_shows(bug: PlantedBug) -> None:
    kernel = bug.build()
    case = next(case for case in (MANY, FEW) if bug.trigger(case))
    jobs = (job for check in _CHECKS for job in plan.single(kernel, case, [BY_NAME[check]]).jobs)
    assert_dies_by_what_it_shows(bug, jobs)


@pytest.mark.nightly
@pytest.mark.parametrize("case", [MANY, FEW, dataclasses.replace(MANY, dtype="bf16")], ids=lambda case: case.id)
def test_the_kernels_without_a_bug_are_right_there(case: Case) -> None:
    jobs = plan.single(registry.find("moba_tpu"), case, [BY_NAME[check] for check in _CHECKS]).jobs
    found = without_second_looks().run(jobs)
    assert [record for record in found if record.verdict in RED] == []
    assert {record.check for record in found if record.ratio is not None} == set(_CHECKS)
