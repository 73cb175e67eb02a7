"""Annotate a run or a comparison for GitHub Actions, if this process is a step of one of its jobs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from conformance.execution import kernel_errors
from conformance.records import ERROR, Record
from reports import github_annotations
from reports.changes import Comparison


def annotate_run(
    found: Iterable[Record], changed: Comparison | None = None, probes: Iterable[Record] = ()
) -> list[str]:
    """Return the lines that annotate a run, and what became worse since a baseline; none outside of GitHub."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return []
    lines = github_annotations.annotate_records(found, _find_place, probes)
    if changed is not None:
        lines += github_annotations.annotate_changes(changed, _find_place, without_failures=True)
    return github_annotations.format_commands(lines)


def annotate_comparison(changed: Comparison) -> list[str]:
    """Return the lines that annotate a comparison; none outside of GitHub."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return []
    return github_annotations.format_commands(github_annotations.annotate_changes(changed, _find_place))


def _find_place(record: Record) -> github_annotations.Place | None:
    """Return the line of the user's code at which a call raised, from the top of GitHub's checkout."""
    if record.verdict != ERROR or (place := kernel_errors.parse_place(record.reason)) is None:
        return None
    top = Path(os.environ.get("GITHUB_WORKSPACE") or Path.cwd())
    try:
        return Path(place.file).resolve().relative_to(top.resolve()).as_posix(), place.line
    except ValueError:  # the file is outside of the checkout
        return None
