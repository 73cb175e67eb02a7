"""Test in how many cases the verdict on a kernel may depend on the compiler's flags."""

from __future__ import annotations

import math

import pytest

from conformance.judging import flag_share
from reports.records import ERROR, FAIL, FLAGS_DIFFER, PASS, RATIO_FAST_COMPILE, UNJUDGED, UNSUPPORTED, Record

ALLOWED = ((1, 1), (9, 1), (10, 2), (50, 3), (350, 7), (200_000, 1099))
"""Pairs of a number of judged cases, and how many of them the flags may decide: binomial quantiles."""


def build_records(
    count: int, verdict: str = PASS, *, by_flags: bool = False, implementation: str = "kernel", results: int = 1
) -> list[Record]:
    """Build records of `count` cases with `results` results each; the flags decide cases of their own."""
    figures = {RATIO_FAST_COMPILE: 40.0, FLAGS_DIFFER: 1.0} if by_flags else {}
    return [
        Record(
            implementation=implementation,
            platform="cpu",
            case=f"{number} {by_flags}",
            check="forward",
            observable=f"out.{result}",
            verdict=verdict,
            figures=figures,
        )
        for number in range(count)
        for result in range(results)
    ]


@pytest.mark.parametrize(("judged", "allowed"), ALLOWED)
def test_the_flags_may_decide_as_many_cases_as_chance_explains(judged: int, allowed: int) -> None:
    assert not flag_share.is_beyond_limit(allowed, judged)
    if allowed < judged:
        assert flag_share.is_beyond_limit(allowed + 1, judged)


@pytest.mark.parametrize(("judged", "allowed"), ALLOWED[:5])
def test_the_limit_is_a_binomial_quantile(judged: int, allowed: int) -> None:
    rate = flag_share.CASE_RATE
    terms = [math.comb(judged, n) * rate**n * (1 - rate) ** (judged - n) for n in range(judged + 1)]
    assert sum(terms[allowed:]) > flag_share.MAX_CHANCE > sum(terms[allowed + 1 :])


def test_more_cases_are_a_failure_of_the_kernel() -> None:
    found = [*build_records(4, by_flags=True), *build_records(46), *build_records(10, implementation="other")]
    (excess,) = flag_share.find_excess(found)
    assert (excess.implementation, excess.platform, excess.verdict) == ("kernel", "cpu", FAIL)
    assert "in 4 of 50 cases" in excess.reason
    assert "XLA_FLAGS" in excess.reason


def test_many_results_of_one_case_are_one_case() -> None:
    assert flag_share.find_excess(build_records(1, by_flags=True, results=17)) == []
    (excess,) = flag_share.find_excess(build_records(2, by_flags=True, results=17))
    assert "in 2 of 2 cases" in excess.reason


@pytest.mark.parametrize("verdict", [UNSUPPORTED, UNJUDGED, ERROR])
def test_what_is_not_judged_does_not_count(verdict: str) -> None:
    assert flag_share.find_excess([*build_records(2, by_flags=True), *build_records(10_000, verdict)])


def test_what_stays_wrong_is_no_pass_by_the_flags() -> None:
    assert flag_share.find_excess(build_records(10, FAIL, by_flags=True)) == []


def test_the_failure_itself_is_not_counted_when_a_run_goes_on() -> None:
    found = build_records(2, by_flags=True)
    first = flag_share.find_excess(found)
    assert flag_share.find_excess([*found, *first]) == first
