"""Test that the results of the survey of published libraries are explained."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from conformance.survey import known_failures
from conformance.survey.upstream_findings import name_raising, read_findings
from impls.libraries.library_specs import load_libraries
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


def test_findings_that_only_raise_are_those_without_a_wrong_result() -> None:
    files = (known_failures.find_file(library) for library in load_libraries())
    entries = [entry for file in files if file for entry in tomllib.loads(file.read_text())["expected_failures"]]
    results: dict[str, set[str]] = {}
    for entry in entries:
        if "finding" in entry:
            results.setdefault(entry["finding"], set()).update(entry.get("observable", ["*"]))
    raising = name_raising(read_findings())
    assert raising
    for finding, observables in results.items():
        if observables == {"all"}:  # what a call that raises is recorded as
            assert finding in raising
        if any(
            re.match(r"d[a-z?]|out|logsumexp|max_logits|products", one)
            for one in observables - {"deep", "documents", "donated"}
        ):
            assert finding not in raising, finding
