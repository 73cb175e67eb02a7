"""Rings that keep the first tokens: correct kernels in three styles pass, and each planted bug is red at quick."""

from __future__ import annotations

import dataclasses

import pytest

from cases.case_id import parse_case_id
from cases.storage_forms.server_traces import build_traces
from conformance.execution.plain_functions import build_implementation
from conformance.judging import run_plan
from impls.contract.implementation import Implementation
from reports.records import PASS, RED
from tests.bank import PlantedBug
from tests.bank.examination import create_single_look_runner, iter_red_records, shows_as_declared
from tests.kernels import ring_attention
from tests.planted.planting import kept_ring, ring_cache
from tests.planted.serving.kept_ring import BUGS

CORRECT = {
    "steps": kept_ring.build_implementation("right"),
    "slots": build_implementation(ring_attention.attend_ring, "slots"),
    "tokens": build_implementation(ring_attention.attend_by_token, "tokens"),
}
CASES = (
    "decode/f32/B4.T1.S127.N2.K1.H16.V16/own-l11-f4-64-15-3-127/sinks/ring16/normal/s0",
    "prefill/bf16/B3.T4.S40.N4.K2.H16.V24/own-l5-f4-40-32-2/softcap30/scale0.3/ring16/normal/s0",
    "prefill/f16/B4.T6.S20.N2.K2.H16.V16/own-l0-f1-15-7-20-6/ring7/normal/s0",
)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", CORRECT.values(), ids=CORRECT)
def test_a_correct_kernel_passes(kernel: Implementation, case: str) -> None:
    records = create_single_look_runner().run(run_plan.plan_case(kernel, parse_case_id(case)).jobs)
    assert [one for one in records if one.verdict in RED] == []
    assert {"out", "logsumexp"} <= {one.observable for one in records if one.verdict == PASS}


@pytest.mark.parametrize("kernel", CORRECT.values(), ids=CORRECT)
def test_a_correct_kernel_passes_a_server_trace(kernel: Implementation) -> None:
    (case,) = (case for case in build_traces(supports=kernel.supports) if case.first_tokens)
    records = create_single_look_runner().run(run_plan.plan_case(kernel, case).jobs)
    assert {one.verdict for one in records} == {PASS}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_red(bug: PlantedBug) -> None:
    red = next(iter_red_records(bug, "quick"))
    assert shows_as_declared(bug, red), (red.check, red.observable, red.case, red.reason)


def test_a_ring_without_the_parameter_gets_no_such_case() -> None:
    plain = ring_cache.build_implementation("plain")
    assert "first_tokens: not declared" in (plain.supports(parse_case_id(CASES[0])) or "")
    assert plain.supports(parse_case_id(CASES[0].replace("-f4", ""))) is None


@pytest.mark.parametrize(
    ("slots", "reason"), [(4, "4 slots for 4 first tokens"), (15, "see up to 12 of 127 tokens, and 11 slots")]
)
def test_a_ring_that_is_too_small_is_unsupported(slots: int, reason: str) -> None:
    case = dataclasses.replace(parse_case_id(CASES[0]), storage=f"ring{slots}")
    assert reason in (CORRECT["steps"].supports(case) or "")
