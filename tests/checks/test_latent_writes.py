"""Calls that write latents into pages: correct ones in two styles pass, and each planted bug is red at quick."""

from __future__ import annotations

import dataclasses

import pytest

from cases.case_id import parse_case_id
from conformance.execution.plain_functions import build_implementation
from conformance.judging import run_plan
from impls.contract.implementation import Implementation
from reports.records import PASS, RED
from tests.bank import PlantedBug
from tests.bank.examination import create_single_look_runner, iter_red_records, shows_as_declared
from tests.kernels import latent_attention
from tests.planted.planting.latent_writes import writing
from tests.planted.serving.latent_writes import BUGS

CORRECT = {
    "steps": writing("right"),
    "loops": build_implementation(latent_attention.writing, "loops"),
    "whole": build_implementation(latent_attention.writing_whole, "whole"),
}
CASES = (
    "prefill/f32/B4.T13.S45.N4.K1.H80.V64/own-linf-45-32-33-9/scale0.144/latent16-q13-1-1-9/normal/s0",
    "prefill/bf16/B3.T32.S64.N3.K1.H40.V32/own-l7-18-48-64/softcap30/sinks/scale0.3/latentshared16-q1-16-32/normal/s0",
    "decode/f16/B4.T1.S15.N4.K1.H24.V16/own-l40-5-11-4-15/scale0.144/latentshared5-q0-1-1-1/large/s0",
)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", CORRECT.values(), ids=CORRECT)
def test_a_correct_kernel_passes(kernel: Implementation, case: str) -> None:
    records = create_single_look_runner().run(run_plan.plan_case(kernel, parse_case_id(case)).jobs)
    assert [one for one in records if one.verdict in RED] == []
    assert {"out", "latent_pages"} <= {one.observable for one in records if one.verdict == PASS}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_red(bug: PlantedBug) -> None:
    red = next(iter_red_records(bug, "quick"))
    assert shows_as_declared(bug, red), (red.check, red.observable, red.case, red.reason)


def test_latents_without_a_rotary_part_are_not_written() -> None:
    case = dataclasses.replace(parse_case_id(CASES[0]), head_dim=64)
    assert "no rotary part" in (CORRECT["steps"].supports(case) or "")
