"""Test that the results of the survey of published libraries are explained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conformance.survey.upstream_findings import read_findings
from reports.survey_results import RowResult, read_results
from website import measurement_tables


@pytest.fixture(scope="module")
def results() -> list[RowResult]:
    return read_results(Path(measurement_tables.DATA) / "survey.json.gz")


def test_every_failure_is_known_and_every_finding_has_a_page(results: list[RowResult]) -> None:
    pages = {finding.name for finding in read_findings()}
    for row in results:
        for function in row.functions:
            assert not function.red_count, f"{row.package} {row.version} {function.function}: {function.red[:1]}"
            assert set(filter(None, function.findings)) <= pages


def test_no_reason_names_a_folder_of_the_machine(results: list[RowResult]) -> None:
    assert [row.reason for row in results if re.search(r"(^|[\s(=`'\"])/\w", row.reason)] == []
