"""Test the tables of a survey in Markdown."""

from __future__ import annotations

import dataclasses
import re

from reports import survey_markdown
from reports.records import EXPECTED_FAIL, FAIL, PASS, UNJUDGED
from tests.survey.test_survey_results import build_record, build_row, summarize

RIGHT = summarize(build_record(PASS, "causal"))
IN_F16 = summarize(
    build_record(PASS, "causal"), build_record(EXPECTED_FAIL, "f16", "soft_cap", dtype="f16", finding="x-cap")
)
IN_ALL = summarize(
    *(build_record(EXPECTED_FAIL, dtype, "mqa", dtype=dtype, finding="x-mqa") for dtype in ("f32", "f16"))
)


def list_lines(table: str) -> list[str]:
    return table.splitlines()[2:]


def test_the_newest_version_has_a_verdict_with_its_findings() -> None:
    rows = [build_row(IN_F16, "2.0"), build_row(RIGHT, "1.0")]
    (line,) = list_lines(survey_markdown.format_newest(rows))
    assert "x 2.0" in line
    assert "**wrong** in f16" in line
    assert r"[x-cap](upstream/x-cap.md) (f16, soft\_cap)" in line


def test_a_finding_of_all_dtypes_makes_a_function_wrong_in_general() -> None:
    (line,) = list_lines(survey_markdown.format_newest([build_row(IN_ALL)]))
    assert "| **wrong** |" in line


def test_what_only_raises_is_not_called_wrong() -> None:
    both = summarize(
        build_record(EXPECTED_FAIL, "f32", "mqa", dtype="f32", finding="x-mqa"),
        build_record(EXPECTED_FAIL, "f16", "soft_cap", dtype="f16", finding="x-cap"),
    )
    for function, verdict, link in (
        (IN_F16, "| **raises** in f16 |", r"(raises, f16, soft\_cap)"),
        (both, "| **wrong**, **raises** in f16 |", r"(raises, f16, soft\_cap)"),
        (IN_ALL, "| **wrong** |", "(upstream/x-mqa.md) |"),
    ):
        (line,) = list_lines(survey_markdown.format_newest([build_row(function)], {"x-cap"}))
        assert verdict in line
        assert link in line


def test_a_failure_that_is_not_known_is_named_so() -> None:
    (line,) = list_lines(survey_markdown.format_newest([build_row(summarize(build_record(FAIL, "mqa")))]))
    assert "not explained" in line


def test_versions_with_one_result_share_a_line() -> None:
    rows = [build_row(RIGHT, "3.0"), build_row(IN_F16, "2.0"), build_row(IN_F16, "1.0")]
    first, second = list_lines(survey_markdown.format_versions(rows))
    assert "3.0" in first
    assert "conforms" in first
    assert "2.0 (JAX 0.12.0.1), 1.0 (JAX 0.12.0.1)" in second


def test_one_version_is_in_no_table_of_versions() -> None:
    assert list_lines(survey_markdown.format_versions([build_row(RIGHT)])) == []


def test_what_was_not_judged_has_its_reason() -> None:
    absent = dataclasses.replace(build_row(RIGHT), functions=(), state="not installed", reason="no wheel | for it")
    unjudged = build_row(summarize(build_record(UNJUDGED, "causal")))
    lines = list_lines(survey_markdown.format_unjudged([absent, unjudged]))
    assert r"no wheel \| for it" in lines[0]
    assert "why" in lines[1]


def test_no_name_is_markup() -> None:
    hostile = "a`|b](c) <i>"
    named = dataclasses.replace(IN_ALL, function=hostile, findings={hostile: 1})
    rows = [dataclasses.replace(build_row(named, version), level=hostile) for version in ("2.0", "1.0")]
    absent = dataclasses.replace(rows[0], functions=(), state=hostile, reason=hostile)
    tables = (survey_markdown.format_newest, survey_markdown.format_versions, survey_markdown.format_unjudged)
    for line in (line for table in tables for line in list_lines(table([*rows, absent]))):
        assert len(re.findall(r"(?<!\\)\|", line)) == len(re.findall(r" \| ", line)) + 2
        assert not re.search(r"(?<!\\)`|<i>|b\]\(", line)


def test_facts_count_each_result_once() -> None:
    record = build_record(PASS, "f32", "causal", "mqa")
    assert "| 1 |" in survey_markdown.format_facts([build_row(summarize(record))])
