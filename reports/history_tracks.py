"""Follow each contender through many runs: its verdict in each run, and what changed between runs.

Summaries of single runs go in. `reports.history_page` renders the resulting tracks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from conformance.records import ERROR, FAIL, UNEXPECTED_PASS, UNJUDGED, UNSUPPORTED, Extent, RunInfo
from reports.conformity import CONFORMS, DOES_NOT_CONFORM, KNOWN_FAILURES, NOT_JUDGED, ContenderSummary
from reports.metrics import Counts, rank_share
from reports.record_groups import Contender

WHOLE = "whole"
UNKNOWN = "unknown"
NO_RECORD = "no record"
PASSES = "passes"
UNTIMED = "unknown"
_MAX_VALUE = 10

Changed = tuple[str, str, str]
"""A difference between the conditions of two runs: what differs (such as a version), its old and its new value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunEntry:
    """One run of a history.

    Attributes:
      started: the time when the run began (ISO 8601, UTC); empty if unknown.
      sources: the names of the files that hold its records.
      contenders: the verdict on each contender.
      info: the run record: level, versions and other facts about the whole run.
      planned: the names of the implementations that the run planned to judge.
    """

    started: str
    sources: tuple[str, ...]
    contenders: tuple[ContenderSummary, ...]
    info: RunInfo
    planned: frozenset[str] = frozenset()

    @property
    def time(self) -> str:
        """The time when the run began, to the minute."""
        return self.started[:16].replace("T", " ") or UNTIMED

    @property
    def files(self) -> str:
        """The name of the run's first file, and the number of its other files."""
        more = len(self.sources) - 1
        return self.sources[0] + (f" and {more} more" if more else "")


@dataclasses.dataclass(frozen=True)
class RunPoint:
    """One contender in one run of a history.

    Attributes:
      number: the number of the run in the history, from 1.
      entry: the run.
      summary: the verdict on the contender; None if the run has no record of it.
      extent: how many of the contender's planned jobs were judged, and whether that is the whole level.
      changed: the differences from the contender's previous run.
    """

    number: int
    entry: RunEntry
    summary: ContenderSummary | None
    extent: Extent
    changed: tuple[Changed, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether every job of the level was judged for this contender."""
        return self.summary is not None and self.extent.is_whole

    @property
    def conformity(self) -> str:
        """The verdict that the records give, even if only a part of the level was run."""
        return self.summary.conformity if self.summary is not None else NOT_JUDGED

    @property
    def verdict(self) -> str:
        """The verdict in a few words.

        It says "passes" in place of "conforms" if only a part of the level was run, or if only one check judged.
        """
        if self.summary is None:
            return NO_RECORD
        is_narrow = not self.is_whole or self.summary.is_of_one_check
        if self.conformity in (CONFORMS, KNOWN_FAILURES) and is_narrow:
            return self.conformity.replace(CONFORMS, PASSES)
        return self.conformity

    @property
    def text(self) -> str:
        """The verdict with its qualifications, in the words of all other reports."""
        return self.summary.text if self.summary is not None else NO_RECORD

    @property
    def asked(self) -> str:
        """How much of the level was run: `whole`, `unknown`, or what made it less, such as `interrupted`."""
        extent = self.extent
        if not extent.known:
            return UNKNOWN
        parts = {
            "interrupted": extent.stopped,
            "smoke": extent.level == "smoke",
            "narrowed": bool(extent.narrowed),
            "partial": extent.is_partial and not extent.stopped,
        }
        return ", ".join(word for word, holds in parts.items() if holds) or WHOLE

    @property
    def level(self) -> str:
        """The level of the run, such as `quick`, which determines its cases."""
        return self.extent.level or (UNKNOWN if not self.extent.known else self.entry.info.level)

    @property
    def counts(self) -> Counts:
        """The number of the contender's records by verdict."""
        return self.summary.counts if self.summary is not None else Counts({})

    @property
    def failures(self) -> int:
        """The number of judged records that are red."""
        return self.counts[FAIL] + self.counts[UNEXPECTED_PASS]

    @property
    def errors(self) -> int:
        """The number of records of calls that raised."""
        return self.counts[ERROR]

    @property
    def judged(self) -> int:
        """The number of records for which a result was compared."""
        return self.counts.judged

    @property
    def unsupported(self) -> int:
        """The number of records of cases that are declared unsupported, or that the call refused."""
        return self.counts[UNSUPPORTED]

    @property
    def unjudged(self) -> int:
        """The number of records that could not be judged."""
        return self.counts[UNJUDGED]

    @property
    def largest(self) -> float | None:
        """The largest judged error figure as a share of its limit; None if there is none."""
        worst = self.summary.worst if self.summary is not None else None
        return worst.share if worst is not None else None

    @property
    def is_over(self) -> bool:
        """Whether the largest judged error figure is beyond its limit."""
        return rank_share(self.largest) > 1

    @property
    def seconds(self) -> float:
        """Seconds spent on judging the contender, summed over all processes."""
        return self.summary.seconds if self.summary is not None else 0.0


@dataclasses.dataclass(frozen=True)
class RunTrack:
    """One contender in all runs that planned to judge it, from the oldest to the newest."""

    contender: Contender
    points: tuple[RunPoint, ...]


def build_tracks(
    entries: Sequence[RunEntry], find_changed: Callable[[int, int, str], Sequence[Changed]]
) -> list[RunTrack]:
    """Build the track of each contender through the runs.

    Args:
      entries: the runs, from the oldest to the newest.
      find_changed: takes the indices of two runs and the name of an implementation. Returns the differences between the
        conditions under which the two runs judged the implementation.
    """
    summaries = [{one.contender: one for one in entry.contenders} for entry in entries]
    contenders = sorted({contender for found in summaries for contender in found})
    met = {contender.implementation for contender in contenders}
    contenders += sorted(Contender(name, "") for name in {n for entry in entries for n in entry.planned} - met)
    tracks = []
    for contender in contenders:
        places = [n for n, entry in enumerate(entries) if contender in summaries[n] or _has_no_record(contender, entry)]
        points = []
        for before, place in zip([None, *places], places, strict=False):
            summary, entry = summaries[place].get(contender), entries[place]
            changed = find_changed(before, place, contender.implementation) if before is not None else ()
            extent = summary.extent if summary is not None else _build_unrecorded_extent(entry)
            points.append(RunPoint(place + 1, entry, summary, extent, tuple(changed)))
        tracks.append(RunTrack(contender, tuple(points)))
    return tracks


def _has_no_record(contender: Contender, entry: RunEntry) -> bool:
    """Return whether a run planned to judge an implementation and left no record of it."""
    name = contender.implementation
    return name in entry.planned and not any(one.contender.implementation == name for one in entry.contenders)


def _build_unrecorded_extent(entry: RunEntry) -> Extent:
    return Extent(level=entry.info.level, stopped=entry.info.interrupted, planned=1)


def find_failing_since(track: RunTrack) -> RunPoint | None:
    """Find the first run since which a contender fails; return None if it does not fail now.

    A run with a red record fails, even if it covered only a part of its level. A failure ends only with a run of the
    whole level that conforms. Runs of a part of the level, and runs without records, do not end it.
    """
    first = None
    for point in reversed(track.points):
        if point.conformity == DOES_NOT_CONFORM:
            first = point
        elif _is_conforming(point):
            break
    return first


def format_since(track: RunTrack) -> str:
    """Format the latest verdict on a contender, and since which run it holds.

    The text names the run since which the contender fails, or the last run that failed. It also names the last run of a
    whole level that conformed.
    """
    last = track.points[-1]
    parts = [f"{last.text} in run {last.number}"]
    red = [point for point in track.points if point.conformity == DOES_NOT_CONFORM]
    right = [point for point in track.points if _is_conforming(point)]
    if (first := find_failing_since(track)) is not None:
        right = [point for point in right if point.number < first.number]
        later = ", and no whole run after it has conformed" if last is not red[-1] else ""
        parts.append(f"fails since run {first.number} ({first.entry.time}){later}")
    elif red:
        parts.append(f"run {red[-1].number} ({red[-1].entry.time}) was the last that failed")
    if right and right[-1] is not last:
        parts.append(f"run {right[-1].number} was the last whole run that conformed")
    elif not right:
        parts.append("no whole run has conformed before" if first is not None else "no whole run has conformed")
    return "; ".join(parts)


def _is_conforming(point: RunPoint) -> bool:
    return point.is_whole and point.verdict in (CONFORMS, KNOWN_FAILURES)


def format_changed(changed: Changed) -> str:
    """Format one difference between two runs as `name old → new`."""
    name, old, new = changed
    return f"{name} {old} → {new}" if old or new else name


def format_changed_briefly(changed: Changed) -> str:
    """Format one difference between two runs for a label in a chart: its name, and the new value if it is short."""
    name, _, new = changed
    return f"{name} {new}" if new not in ("", "none") and len(new) <= _MAX_VALUE else name


def format_history_headline(tracks: Sequence[RunTrack], entries: Sequence[RunEntry]) -> str:
    """Format the history as one sentence that names the contenders that fail now."""
    runs = "1 run" if len(entries) == 1 else f"{len(entries):,} runs"
    red = [track.contender.label for track in tracks if find_failing_since(track) is not None]
    names = "1 implementation" if len(tracks) == 1 else f"{len(tracks):,} implementations"
    if not red:
        return f"{runs} of {names}: none is known to fail now."
    those = ", ".join(red[:3]) + (f" and {len(red) - 3:,} more" if len(red) > 3 else "")
    return f"{runs} of {names}: {those} {'fails' if len(red) == 1 else 'fail'}."
