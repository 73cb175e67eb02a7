"""The results about the tests of libraries say how they can be repeated, and the page shows all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from reports.mutant_results import read_results
from website import measurement_tables

FILES = sorted((measurement_tables.DATA / "mutants").glob("*.jsonl"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_results_say_what_was_measured_and_where(path: Path) -> None:
    results = read_results(path)
    assert {"library", "version", "jax", "python", "cpu"} <= set(results.environment)
    assert results.command.startswith("pytest ")
    assert " /" not in results.command
    assert results.calls[0] > 0


def test_the_page_has_each_suite() -> None:
    table = measurement_tables.format_suites()
    assert all(read_results(path).command.removeprefix("pytest -q ") in table for path in FILES)
