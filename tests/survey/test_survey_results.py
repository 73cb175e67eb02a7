"""Test how records become the cells of a survey's table."""

from __future__ import annotations

import dataclasses
import json

import pytest

from conformance.judging.settings import ExpectedFailure, Settings
from reports.conformity import IN_PART
from reports.page_model import build_summary
from reports.records import EXPECTED_FAIL, FAIL, PASS, UNJUDGED, UNSUPPORTED, Record, RunInfo
from reports.survey_page import (
    HIDDEN,
    KNOWN,
    NEW,
    PASSES,
    RAISES,
    REFUSES,
    WRONG,
    build_lines,
    find_state,
    render_survey_page,
)
from reports.survey_results import (
    FunctionResult,
    RowResult,
    find_finding,
    parse_results,
    summarize_function,
    to_plain_data,
)

NAME = "library:x.attention"


def build_record(verdict: str, *features: str, dtype: str = "f32", finding: str = "", ratio: float = 0.5) -> Record:
    number = f"{'-'.join(features)}/{verdict}"
    record = Record(
        implementation=NAME, platform="cpu", case=f"train/{dtype}/{number}", check="forward", observable="out",
        verdict=FAIL if verdict == EXPECTED_FAIL else verdict, dtype=dtype, features=features, ratio=ratio, limit=1.0,
        reason="" if verdict == PASS else "why",
    )  # fmt: skip
    if verdict != EXPECTED_FAIL:
        return record
    entry = ExpectedFailure(implementation=NAME, reason="known", finding=finding)
    return Settings(expected_failures=(entry,)).mark_expected_failures(record, "0.10.2")


def summarize(*records: Record) -> FunctionResult:
    info = RunInfo(command="", level="smoke", environment={}, tolerances=[])
    summary = build_summary(records, info)
    (implementation,) = summary.implementations
    return summarize_function(implementation, records, ("behind_mask='finite'",))


def test_the_finding_of_an_expected_failure_is_read_from_its_reason() -> None:
    assert find_finding(build_record(EXPECTED_FAIL, "causal", finding="x-no-causal")) == "x-no-causal"
    assert find_finding(build_record(EXPECTED_FAIL, "causal")) == ""


CAPPED = [build_record(EXPECTED_FAIL, mask, "soft_cap", finding="cap") for mask in ("causal", "full")]


@pytest.mark.parametrize(
    ("records", "feature", "expected"),
    [
        ([build_record(PASS, "causal")], "causal", PASSES),
        ([build_record(PASS, "causal"), build_record(FAIL, "causal")], "causal", NEW),
        ([*CAPPED, build_record(PASS, "causal")], "causal", PASSES),
        ([*CAPPED, build_record(PASS, "causal")], "soft_cap", WRONG),
        (CAPPED, "causal", HIDDEN),
        ([build_record(EXPECTED_FAIL, "full", "train", finding="all")], "train", WRONG),
        ([build_record(EXPECTED_FAIL, mask, "f32", finding="dtype") for mask in ("causal", "full")], "causal", WRONG),
        ([build_record(EXPECTED_FAIL, "causal")], "causal", KNOWN),
        ([build_record(UNSUPPORTED, "causal")], "causal", REFUSES),
        ([build_record(UNJUDGED, "causal")], "causal", "unjudged"),
    ],
    ids=["pass", "new", "elsewhere", "wrong", "hidden", "everywhere", "dtype", "known", "refuses", "unjudged"],
)
def test_the_state_of_a_cell(records: list[Record], feature: str, expected: str) -> None:
    function = summarize(*records)
    assert find_state(function, feature, function.cells[f"{feature} f32"]) == expected


def build_row(function: FunctionResult, version: str = "1.0") -> RowResult:
    return RowResult(
        library="x", package="x", version=version, state="judged", reason="", level="smoke",
        started="2026-11-27T00:00:00+00:00", environment={"jax": "0.12.0.1", "machine": "a machine"},
        functions=(function,), missing=(),
    )  # fmt: skip


def test_results_survive_json() -> None:
    function = summarize(
        build_record(PASS, "causal", dtype="bf16"),
        build_record(EXPECTED_FAIL, "full", finding="f"),
        build_record(FAIL, "mqa"),
    )
    rows = [build_row(function)]
    assert parse_results(json.loads(json.dumps(to_plain_data(rows)))) == rows
    with pytest.raises(ValueError, match="schema"):
        parse_results({"schema": "other", "rows": []})


def test_the_page_shows_findings_new_failures_and_what_was_not_judged() -> None:
    function = summarize(build_record(EXPECTED_FAIL, "full", finding="x-wrong"), build_record(FAIL, "mqa"))
    rows = [build_row(function, "2.0"), build_row(function, "1.0")]
    rows.append(dataclasses.replace(rows[0], version="0.9", functions=(), state="not installed", reason="no wheel <b>"))
    page = render_survey_page(rows, {"x-wrong": "x.attention is wrong"})
    for text in (
        "x.attention is wrong",
        "no wheel &lt;b&gt;",
        "behind_mask=",
        "survey --library=x.attention==2.0",
        "new failure",
    ):
        assert text in page
    assert page.count('data-newest="1"') == 1


def test_a_function_that_was_called_in_part_is_judged() -> None:
    function = dataclasses.replace(summarize(build_record(PASS, "causal")), conformity=IN_PART)
    (line,) = build_lines([build_row(function)], ["causal"])
    assert line.state == IN_PART
    assert IN_PART in render_survey_page([build_row(function)], {})


def test_what_only_raises_has_its_own_mark() -> None:
    function = summarize(build_record(EXPECTED_FAIL, "causal", finding="x-raises"))
    for raising, state in (({"x-raises"}, RAISES), ({"x-other"}, WRONG)):
        (line,) = build_lines([build_row(function)], ["causal"], raising)
        assert (line.state, line.marks["causal"][0].state) == (state, state)
