"""Format annotations of a run or a comparison for GitHub Actions, if this process runs in one of its jobs.

GitHub turns the printed lines into messages at the lines of a pull request's files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from conformance.execution import kernel_errors
from reports import github_annotations
from reports.changes import Comparison
from reports.records import ERROR, Record, RunInfo


def annotate_run(found: Iterable[Record], changed: Comparison | None = None, info: RunInfo | None = None) -> list[str]:
    """Return the lines to print that annotate a run, and the regressions since a baseline; none outside of GitHub.

    Args:
      info: what was found out about the findings afterwards; None if unknown.
    """
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return []
    found = tuple(found)
    if info is None:
        lines = github_annotations.annotate_records(found, _find_place)
    else:
        lines = github_annotations.annotate_records(found, _find_place, info.probes, info.diagnoses, info.proposals)
        lines += github_annotations.annotate_uncalled(found, info)
    if changed is not None:
        lines += github_annotations.annotate_changes(changed, _find_place, without_failures=True)
    return github_annotations.format_commands(lines)


def annotate_comparison(changed: Comparison) -> list[str]:
    """Return the lines to print that annotate a comparison; none outside of GitHub."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return []
    return github_annotations.format_commands(github_annotations.annotate_changes(changed, _find_place))


def _find_place(record: Record) -> github_annotations.Place | None:
    """Return the file and line of the user's code at which a call raised; None if unknown or outside the checkout.

    The file's path is relative to the top of GitHub's checkout.
    """
    if record.verdict != ERROR or (place := kernel_errors.parse_place(record.reason)) is None:
        return None
    top = Path(os.environ.get("GITHUB_WORKSPACE") or Path.cwd())
    try:
        return Path(place.file).resolve().relative_to(top.resolve()).as_posix(), place.line
    except ValueError:  # the file is outside of the checkout
        return None
