"""Test how many passes of a kernel may depend on the compiler's flags."""

from __future__ import annotations

import math

import pytest

from conformance.judging import flag_share
from reports.records import ERROR, FAIL, FLAGS_DIFFER, PASS, RATIO_FAST_COMPILE, UNJUDGED, UNSUPPORTED, Record

LARGEST = math.floor(1000 * flag_share.MAX_SHARE)


def build_records(
    count: int, verdict: str = PASS, *, by_flags: bool = False, implementation: str = "kernel"
) -> list[Record]:
    figures = {RATIO_FAST_COMPILE: 40.0, FLAGS_DIFFER: 1.0} if by_flags else {}
    return [
        Record(
            implementation=implementation,
            platform="cpu",
            case=str(number),
            check="forward",
            observable="out",
            verdict=verdict,
            figures=figures,
        )
        for number in range(count)
    ]


def test_a_small_share_of_passes_may_rest_on_the_flags() -> None:
    found = [*build_records(LARGEST, by_flags=True), *build_records(1000 - LARGEST)]
    assert flag_share.find_excess(found) == []


def test_a_larger_share_is_a_failure_of_the_kernel() -> None:
    found = [
        *build_records(LARGEST + 1, by_flags=True),
        *build_records(1000 - LARGEST - 1),
        *build_records(10, implementation="other"),
    ]
    (excess,) = flag_share.find_excess(found)
    assert (excess.implementation, excess.platform, excess.verdict) == ("kernel", "cpu", FAIL)
    assert f"{LARGEST + 1} of 1,000" in excess.reason
    assert "XLA_FLAGS" in excess.reason


@pytest.mark.parametrize(("judged", "allowed"), [(flag_share.MANY - 1, 0), (flag_share.MANY, 4), (800, 4), (4000, 20)])
def test_a_run_with_few_results_may_have_four(judged: int, allowed: int) -> None:
    for more in (0, 1):
        found = [*build_records(allowed + more, by_flags=True), *build_records(judged - allowed - more)]
        assert len(flag_share.find_excess(found)) == more


def test_the_only_result_may_not_rest_on_the_flags() -> None:
    assert len(flag_share.find_excess(build_records(1, by_flags=True))) == 1


@pytest.mark.parametrize("verdict", [UNSUPPORTED, UNJUDGED, ERROR])
def test_what_is_not_judged_makes_the_share_no_smaller(verdict: str) -> None:
    assert flag_share.find_excess([*build_records(1, by_flags=True), *build_records(10_000, verdict)])


def test_what_stays_wrong_is_no_pass_by_the_flags() -> None:
    assert flag_share.find_excess(build_records(10, FAIL, by_flags=True)) == []


def test_the_failure_itself_is_not_counted_when_a_run_goes_on() -> None:
    found = [*build_records(LARGEST + 1, by_flags=True), *build_records(1000 - LARGEST - 1)]
    first = flag_share.find_excess(found)
    assert flag_share.find_excess([*found, *first]) == first
