"""Test how the known failures of a library are matched to the records of a row."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from conformance.judging.settings import ExpectedFailure, Settings
from conformance.survey.known_failures import mark_known_failures
from reports.records import EXPECTED_FAIL, FAIL, PASS, RED, UNEXPECTED_PASS, Record

NAME = "library:x.attention"
VERSIONS = {"jax": "0.12.0.1", "x": "1.2"}
FAILED = Record(
    implementation=NAME, platform="cpu", case="train/f16/B1.T8.S8.N1.K1.H8.V8/causal/normal/s0", check="forward",
    observable="out", verdict=FAIL, dtype="f16", reason="is NaN",
)  # fmt: skip
PASSED = msgspec.structs.replace(FAILED, case=FAILED.case.replace("f16", "f32"), dtype="f32", verdict=PASS, reason="")
ENTRY = ExpectedFailure(implementation=NAME, reason="known", case="train/f16", finding="x-nan")


def list_red(records: list[Record], *entries: ExpectedFailure) -> list[Record]:
    return [record for record in mark_known_failures(records, entries, VERSIONS, "quick") if record.verdict in RED]


def test_an_entry_explains_failures_of_a_finished_row() -> None:
    marked, passed = mark_known_failures([FAILED, PASSED], [ENTRY], VERSIONS, "quick")
    assert (marked.verdict, passed.verdict) == (EXPECTED_FAIL, PASS)
    assert "finding x-nan: known" in marked.reason


@pytest.mark.parametrize("now", [(), (dataclasses.replace(ENTRY, case="train/bf16"),)], ids=["gone", "narrower"])
def test_an_entry_that_is_gone_or_narrower_leaves_the_failure_with_its_first_reason(
    now: tuple[ExpectedFailure, ...],
) -> None:
    earlier = mark_known_failures([FAILED, PASSED], [ENTRY], VERSIONS, "quick")
    assert list_red(earlier, *now) == [FAILED]


def test_marking_twice_is_marking_once() -> None:
    once = mark_known_failures([FAILED, PASSED], [ENTRY], VERSIONS, "quick")
    assert mark_known_failures(once, [ENTRY], VERSIONS, "quick") == once


@pytest.mark.parametrize(("package", "red"), [("x>=1.2", 0), ("x<1.2", 1), ("absent>=1", 1)])
def test_an_entry_of_other_versions_explains_nothing(package: str, red: int) -> None:
    assert len(list_red([FAILED], dataclasses.replace(ENTRY, package=package))) == red


@pytest.mark.parametrize("some", [False, True])
def test_an_entry_whose_results_all_pass_is_red(some: bool) -> None:
    (stale, *_) = list_red([PASSED], dataclasses.replace(ENTRY, case="train/f32", some=some))
    assert stale.verdict == UNEXPECTED_PASS


def test_a_failure_that_depends_on_the_values_may_be_missing_from_few_cases() -> None:
    entry = dataclasses.replace(ENTRY, case="train/f32", some=True)
    assert [one.verdict for one in mark_known_failures([PASSED], [entry], VERSIONS, "smoke")] == [PASS]


def test_an_entry_about_cases_of_another_level_is_not_red() -> None:
    assert not list_red([PASSED], ENTRY)


def test_a_record_without_its_mark_is_what_it_was() -> None:
    settings = Settings(expected_failures=(ENTRY, dataclasses.replace(ENTRY, case="train/f32")))
    for record in (FAILED, PASSED):
        marked = settings.mark_expected_failures(record, "0.12.0.1")
        assert marked != record
        assert Settings.unmark_expected_failure(marked) == record
