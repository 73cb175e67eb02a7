"""What GitHub Actions is told of a run or a comparison, where this is a step of one of its jobs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from conformance.calling import mishaps
from conformance.records import ERROR, Record
from reports import annotating
from reports.changes import Comparison


def annotated(found: Iterable[Record], changed: Comparison | None = None, probes: Iterable[Record] = ()) -> list[str]:
    """The lines that annotate a run, and what became worse in it than in an earlier one; none outside of GitHub."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return []
    told = annotating.of_records(found, _place, probes)
    if changed is not None:
        told += annotating.of_changes(changed, _place, without_failures=True)
    return annotating.commands(told)


def compared(changed: Comparison) -> list[str]:
    """The lines that annotate a comparison; none outside of GitHub."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return []
    return annotating.commands(annotating.of_changes(changed, _place))


def _place(record: Record) -> annotating.Place | None:
    """The line of the user's code that a call raised at, from the top of what GitHub has checked out."""
    if record.verdict != ERROR or (place := mishaps.place_in(record.reason)) is None:
        return None
    top = Path(os.environ.get("GITHUB_WORKSPACE") or Path.cwd())
    try:
        return Path(place.file).resolve().relative_to(top.resolve()).as_posix(), place.line
    except ValueError:  # of no file that GitHub could show
        return None
