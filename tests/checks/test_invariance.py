"""Tests of the check `invariance`, and of the bounds of merged results."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from cases.case_id import parse_case_id
from cases.operand_values import draw_problem
from conformance.checks import CHECKS_BY_NAME, invariance
from conformance.execution.implementation_registry import find_implementation
from conformance.judging import run_plan
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from conformance.truth.rounding_bounds import compute_expectation
from impls.contract.declarations import Arithmetic
from reports.records import PASS, RED

# The results are far smaller than those of the two halves, which are rounded to bf16 separately.
LONG = "prefill/bf16/B1.T64.S320.N6.K2.H32.V32/causal/softcap2/sinks/bias/scale0.3/kvint8-token/normal/s0"


def test_halves_that_are_rounded_and_cancel_are_no_failure() -> None:
    job = run_plan.plan_case(
        find_implementation("quantized_kv"), parse_case_id(LONG), [CHECKS_BY_NAME["invariance"]]
    ).jobs
    found = Runner(Settings()).run(job)
    assert [record for record in found if record.verdict in RED] == []
    assert {record.observable for record in found if record.verdict == PASS} >= {"out.merged", "logsumexp.merged"}


@pytest.mark.parametrize("part", [0, 1])
@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**16), sign=st.sampled_from([-1.0, 1.0]))
def test_parts_at_their_bounds_merge_within_the_merged_bounds(part: int, seed: int, sign: float) -> None:
    """All elements of one part are off by their bound; merged results must stay within theirs."""
    problem = draw_problem(parse_case_id(f"prefill/bf16/B1.T8.S24.N2.K1.H16.V16/full/bias/large/s{seed}"))
    halves = [invariance._select_keys(problem, slice(start, None, 2)) for start in (0, 1)]
    parts = [compute_expectation(half, Arithmetic()) for half in halves]
    exact = [{name: one.value for name, one in each.forward.items()} for each in parts]
    off = [dict(each) for each in exact]
    for name, one in parts[part].forward.items():
        off[part][name] = one.value + sign * one.bound
    bounds = invariance._compute_merged_bounds(parts)
    whole, moved = invariance._merge(exact), invariance._merge(off)
    for name, bound in bounds.items():
        second = 1 + 4 * max(float(np.max(each.forward["logsumexp"].bound)) for each in parts)
        # Tolerance: bounds are to first order; second-order terms are smaller by a factor of the `logsumexp` error.
        assert np.all(np.abs(moved[name] - whole[name]) <= second * bound), name


def test_a_half_that_is_off_by_more_than_rounding_is_a_failure() -> None:
    whole = find_implementation("quantized_kv")

    def attention(q: Any, k: Any, v: Any, **named: Any) -> Any:
        if k.shape[1] > 200:
            return whole.call(q, k, v, **named)
        out, residuals = whole.call(q, k, v, **{**named, "save_residuals": True})
        return (out * 1.02, residuals) if named.get("save_residuals") else out * 1.02

    wrong = dataclasses.replace(whole, call=attention)
    job = run_plan.plan_case(wrong, parse_case_id(LONG), [CHECKS_BY_NAME["invariance"]]).jobs
    assert "out.merged" in {record.observable for record in Runner(Settings()).run(job) if record.verdict in RED}
