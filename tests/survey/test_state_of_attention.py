"""Test that the page of published libraries is what its generator writes, and that its results are explained."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from conformance.survey.upstream_findings import read_findings
from impls.libraries.library_specs import load_libraries
from reports.survey_results import RowResult, read_results

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """Load the script, which is in no package."""
    path = ROOT / "docs" / "generate_state_of_attention.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results(generator: ModuleType) -> list[RowResult]:
    return read_results(generator.DATA)


def test_the_pages_are_current(generator: ModuleType) -> None:
    old = [str(path) for path, text in generator.build_pages().items() if path.read_text(encoding="utf-8") != text]
    assert old == [], "run `python docs/generate_state_of_attention.py`"


def test_every_failure_is_known_and_every_finding_has_a_page(results: list[RowResult]) -> None:
    pages = {finding.name for finding in read_findings()}
    for row in results:
        for function in row.functions:
            assert not function.red_count, f"{row.package} {row.version} {function.function}: {function.red[:1]}"
            assert set(filter(None, function.findings)) <= pages


def test_no_reason_names_a_folder_of_the_machine(results: list[RowResult]) -> None:
    assert [row.reason for row in results if re.search(r"(^|[\s(=`'\"])/\w", row.reason)] == []


def test_every_listed_version_is_in_the_results_or_named_as_missing(
    generator: ModuleType, results: list[RowResult]
) -> None:
    there = {(row.library, row.version) for row in results}
    missing = generator.PAGE.read_text(encoding="utf-8").partition("not part of these results: ")[2].partition("\n")[0]
    for library in load_libraries().values():
        for version in library.versions:
            is_named = f"{library.package} {version}" in missing.removesuffix(".").split(", ")
            assert is_named != ((library.name, version) in there), f"{library.name} {version}"
