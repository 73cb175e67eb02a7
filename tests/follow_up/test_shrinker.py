"""Test that a failure is shrunk to a smaller case that fails in the same way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from cases.case import Case
from cases.case_id import parse_case_id
from conformance import declare
from conformance.checks import CHECKS_BY_NAME
from conformance.execution.plain_functions import build_implementation
from conformance.follow_up import shrinker
from conformance.follow_up.shrinker import ShrunkCase, iter_alternatives
from conformance.judging.explorer import compute_plainness
from conformance.judging.job import Job
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from reports.records import RED
from tests.kernels import naive

FAILING = parse_case_id("train/bf16/B2.T48.S72.N4.K2.H16.V16/causal-o24/softcap30/sinks/bias/large/s3")


@declare(behind_mask="finite")
def ignore_sinks(q: Any, k: Any, v: Any, *, causal: Any = False, mask: Any = None, soft_cap: Any = None,
                  sinks: Any = None, bias: Any = None) -> Any:  # fmt: skip
    """Ignore sinks."""
    return naive.attention(q, k, v, causal=causal, mask=mask, soft_cap=soft_cap, bias=bias)


@declare(behind_mask="finite")
def fail_twice(q: Any, k: Any, v: Any, *, causal: Any = False, mask: Any = None, soft_cap: Any = None,
            sinks: Any = None, bias: Any = None) -> Any:  # fmt: skip
    """Be wrong with sinks, and wrong with a soft cap."""
    wrong = sinks is not None or soft_cap is not None
    return naive.attention(
        q, k, v * 2 if wrong else v, causal=causal, mask=mask, soft_cap=soft_cap, bias=bias, sinks=sinks
    )


def shrink_case(function: Callable[..., Any], *, seconds: float = math.inf, **more: Any) -> ShrunkCase:
    """Shrink the failing case."""
    implementation, runner = build_implementation(function, "it"), Runner(Settings())
    record, *_ = (
        one for one in runner.judge(Job(implementation, FAILING, (CHECKS_BY_NAME["forward"],))) if one.verdict in RED
    )
    return shrinker.shrink(implementation, runner, FAILING, record, seconds=seconds, **more)


def test_a_case_is_shrunk_to_what_it_takes() -> None:
    found = shrink_case(ignore_sinks)
    assert found.is_finished
    assert found.case == parse_case_id("train/f32/B1.T1.S1.N1.K1.H1.V1/full/sinks/normal/s0")
    assert [(record.check, record.observable) for record in found.records] == [("forward", "out")]
    assert any(record.verdict in RED for record in found.records)


def test_it_does_not_wander_to_another_fault() -> None:
    found = shrink_case(fail_twice, keeps=lambda case: case.soft_cap is not None)
    assert found.case.soft_cap is not None


def test_without_time_it_stays_as_it_is() -> None:
    found = shrink_case(ignore_sinks, seconds=0)
    assert (found.case, found.tried, found.is_finished) == (FAILING, 0, False)


@pytest.mark.parametrize(
    "case", [FAILING, parse_case_id("decode/f16/B1.T1.S200.N6.K2.H72.V40/own-l31-150/normal/s1"), Case()]
)
def test_alternatives_are_plainer_than_the_case(case: Case) -> None:
    for plainer in iter_alternatives(case):
        for changes in plainer:
            changed = tuple(getattr(case, name) for name in changes)
            assert tuple(changes.values()) != changed
    assert compute_plainness(parse_case_id("train/f32/B1.T1.S1.N1.K1.H1.V1/full/normal/s0")) <= compute_plainness(case)
