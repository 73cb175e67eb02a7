"""Bugs of packed sequences in the flash kernels for GPUs are seen, on two cases of several blocks each way.

They are not in the bank: where a kernel is interpreted all that the gate asks takes minutes a bug.
"""

from __future__ import annotations

import pytest

from cases.case import Case
from conformance.checks import BY_NAME
from conformance.judging import plan
from conformance.records import RED
from conformance.sensitivity import PlantedBug
from conformance.sensitivity.examination import without_second_looks
from impls import flash_gpu
from tests.planted.computing.flash_gpu.packed import BUGS, CASE, CAUSAL
from tests.sensitivity.by_day import every
from tests.sensitivity.interpreted import assert_dies_by_what_it_shows

_CHECKS = ("forward", "residuals", "gradients")


@pytest.mark.parametrize("bug", every(len(BUGS), BUGS))
def test_a_bug_of_packs_dies_by_what_it_shows(bug: PlantedBug) -> None:
    kernel = bug.build()
    assert bug.trigger(CASE)
    assert bug.trigger(CAUSAL)
    cases = ((case, check) for check in _CHECKS for case in (CASE, CAUSAL))
    assert_dies_by_what_it_shows(
        bug, (job for case, check in cases for job in plan.single(kernel, case, [BY_NAME[check]]).jobs)
    )


@pytest.mark.nightly
@pytest.mark.parametrize("case", [CASE, CAUSAL], ids=["window", "causal"])
def test_the_kernels_without_a_bug_are_right_there(case: Case) -> None:
    kernel = flash_gpu.build_packed_implementation("correct", on_gpu=False)
    found = without_second_looks().run(plan.single(kernel, case, [BY_NAME[check] for check in _CHECKS]).jobs)
    assert [record for record in found if record.verdict in RED] == []
    assert {record.check for record in found if record.ratio is not None} == set(_CHECKS)
