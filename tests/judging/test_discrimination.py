"""Test that null results fail the cases of the grid by a margin, and that weak cases are recognised."""

from __future__ import annotations

import dataclasses
import math

import pytest

from cases.case import Case
from cases.case_id import parse_case_id
from cases.grid import build_grid
from conformance.check_api.subchecks import Subchecks
from conformance.check_api.subject import Subject
from conformance.checks import CHECKS
from conformance.execution.executor import Executor
from conformance.execution.implementation_registry import find_implementation
from conformance.judging import discrimination
from conformance.judging.discrimination import REQUIRED_MARGIN, compute_margins, find_weakest_null
from conformance.judging.job import Job
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from conformance.truth.tolerances import load_default_tolerances
from impls.contract.implementation import Implementation
from reports.records import PASS


def raise_if_called(*args: object, **kwargs: object) -> None:
    raise AssertionError("discrimination must not run the implementation")


ORACLE_LIKE = Implementation(name="oracle_like", call=raise_if_called, empty_rows="zero")
STRIDE = 3


def compute_margins_of(case: Case | str, implementation: Implementation = ORACLE_LIKE) -> dict[str, float]:
    case = parse_case_id(case) if isinstance(case, str) else case
    return compute_margins(Subject(Executor(implementation), case, load_default_tolerances()))


@pytest.mark.parametrize("start", [0, *(pytest.param(start, marks=pytest.mark.nightly) for start in (1, 2))])
def test_no_case_of_the_grid_passes_a_null_result(start: int) -> None:
    cases = build_grid("quick", 0).cases[start :: 3 * STRIDE]
    found = {case.id: find_weakest_null(compute_margins_of(case)) for case in cases}
    assert not {case_id: weak for case_id, weak in found.items() if not weak[1] >= REQUIRED_MARGIN}


def test_every_single_discriminates() -> None:
    for case in build_grid("quick", 0).singles[::STRIDE]:
        assert find_weakest_null(compute_margins_of(case))[1] >= REQUIRED_MARGIN, case.id


def test_each_operand_that_a_case_has_gives_a_null_that_ignores_it() -> None:
    joint = "train/f32/B2.T24.S32.N4.K2.H8.V6/causal-o8/seg/softcap2/sinks/bias/scale0.3/normal/s1"
    found = compute_margins_of(joint)
    assert set(found) == {
        *("zeros", "mean_of_v", "mask_ignored", "mask_shifted", "segment_ids_ignored", "wrong_head_map"),
        *("soft_cap_ignored", "sinks_ignored", "bias_ignored", "scale_ignored"),
        *("dq_doubled", "dk_doubled", "dv_doubled", "dsinks_doubled", "dbias_doubled"),
    }
    assert find_weakest_null(found)[1] >= REQUIRED_MARGIN
    plain = compute_margins_of("train/f32/B1.T24.S32.N2.K1.H8.V6/full/normal/s1")
    assert set(plain) == {"zeros", "mean_of_v", "dq_doubled", "dk_doubled", "dv_doubled"}


def test_a_null_that_equals_the_truth_is_not_asked_for() -> None:
    one = compute_margins_of("train/f32/B1.T1.S1.N1.K1.H8.V6/causal/normal/s1")
    assert set(one) == {"zeros", "dv_doubled"}
    # One query that sees every key: the mask hides nothing.
    assert not {"mask_ignored", "mask_shifted"} & set(
        compute_margins_of("train/f32/B1.T1.S9.N2.K2.H8.V6/causal-o8/normal/s1")
    )
    # Segment ids that are all the same hide nothing either.
    assert "segment_ids_ignored" not in compute_margins_of("train/f32/B1.T1.S1.N2.K2.H8.V6/full/seg/normal/s1")


def test_decode_has_no_gradient_nulls() -> None:
    assert not [
        name for name in compute_margins_of("decode/f32/B1.T1.S40.N2.K2.H8.V6/full/normal/s1") if "doubled" in name
    ]


@pytest.mark.parametrize(
    ("case_id", "null"),
    [
        # Logits of 7e4 round by 1% of the probabilities in f32: one key more or less among 200 cannot be seen.
        ("train/f32/B1.T384.S1500.N2.K2.H16.V16/window-l200-r0-o1116/huge/s0", "mask_shifted"),
        # On the flat end of a soft cap dq is exactly zero, and so is a doubled dq.
        ("train/f32/B1.T32.S32.N2.K2.H16.V16/full/softcap2/huge/s0", "dq_doubled"),
        # A scale of almost exactly 1 / sqrt(16).
        ("train/bf16/B1.T32.S32.N2.K2.H16.V16/full/scale0.25000001/normal/s0", "scale_ignored"),
        ("train/f32/B1.T32.S32.N2.K2.H16.V16/full/scale0.25/normal/s0", "scale_ignored"),
    ],
)
def test_a_case_that_cannot_tell_is_below_the_required_margin(case_id: str, null: str) -> None:
    found = compute_margins_of(case_id)
    assert find_weakest_null(found)[0] == null
    assert found[null] < REQUIRED_MARGIN


def test_a_case_whose_turn_does_not_discriminate_is_asked_everything() -> None:
    case = parse_case_id("train/f32/B1.T321.S321.N2.K2.H64.V64/full/huge/s0")
    kernel = find_implementation("dot_product")
    selection = Subchecks(pullbacks=("plain",), cotangents=("row",))
    assert (
        find_weakest_null(compute_margins(Subject(Executor(kernel), case, load_default_tolerances(), selection)))[1]
        < REQUIRED_MARGIN
        <= find_weakest_null(compute_margins_of(case, kernel))[1]
    )
    forward = tuple(check for check in CHECKS if check.name == "forward")
    found = Runner(Settings()).judge(Job(kernel, case, forward, selection))
    assert {(record.check, record.verdict) for record in found} == {("forward", PASS)}


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_stopping_early_does_not_change_the_weakest_margin(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONFORMANCE_CACHE", "")
    small = [case for case in build_grid("quick", 0).cases if case.q_length * case.kv_length < 1 << 15]
    cases = [case for case in small if case.dtype == dtype][::18]
    early = [find_weakest_null(compute_margins_of(case)) for case in cases]
    compute = discrimination._compute_forward_margin
    monkeypatch.setattr(
        discrimination, "_compute_forward_margin", lambda subject, null, enough: compute(subject, null, math.inf)
    )
    for case, (name, margin) in zip(cases, early, strict=True):
        everything = compute_margins_of(case)
        weakest = min(everything.values())
        assert margin == weakest or min(margin, weakest) >= discrimination.AMPLE_MARGIN, (case.id, name)


def test_without_residuals_only_the_output_can_tell() -> None:
    case_id = "train/bf16/B1.T32.S32.N2.K2.H16.V16/causal/sinks/normal/s0"
    blind = dataclasses.replace(ORACLE_LIKE, residuals=frozenset(), differentiable_residuals=frozenset())
    with_residuals, without = compute_margins_of(case_id), compute_margins_of(case_id, blind)
    assert set(with_residuals) == set(without)
    assert without["sinks_ignored"] < with_residuals["sinks_ignored"]


def test_rows_that_are_not_judged_cannot_tell() -> None:
    case_id = "train/f32/B1.T9.S9.N2.K2.H4.V4/causal-o-8/normal/s0"  # only the last row sees anything, one key
    undefined = dataclasses.replace(ORACLE_LIKE, empty_rows="undefined")
    assert math.isfinite(compute_margins_of(case_id, undefined)["zeros"])
    assert compute_margins_of(case_id, undefined)["mask_ignored"] > REQUIRED_MARGIN
    empty = "train/f32/B1.T4.S9.N2.K2.H4.V4/causal-o-8/normal/s0"
    assert compute_margins_of(empty, undefined)["mask_ignored"] == 0.0


def test_the_weakest_null_is_the_one_with_the_smallest_margin() -> None:
    assert find_weakest_null({"zeros": 9.0, "mask_ignored": 2.0, "dq_doubled": 4.0}) == ("mask_ignored", 2.0)
