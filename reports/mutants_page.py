"""Render what `mutants` found as one HTML page: which wrong functions a test suite lets through."""

from __future__ import annotations

from pathlib import Path

from reports import output_files
from reports.mutant_results import CAUGHT, NOT_RUN, PASSED, UNSEEN, MutantOutcome, MutantResults
from reports.template_environment import create_environment


def render_mutants_page(results: MutantResults) -> str:
    """Render the page."""
    lacking: dict[str, list[MutantOutcome]] = {}
    for one in results.select(UNSEEN):
        lacking.setdefault(one.detail, []).append(one)
    return (
        create_environment()
        .get_template("mutants.html.j2")
        .render(
            results=results,
            caught=results.select(CAUGHT),
            passed=results.select(PASSED),
            not_run=results.select(NOT_RUN),
            lacking=sorted(lacking.items(), key=lambda item: -len(item[1])),
        )
    )


def save_mutants_page(path: Path, results: MutantResults) -> None:
    """Write the page to a file. Raises `OSError`."""
    output_files.write_text(path, render_mutants_page(results))
