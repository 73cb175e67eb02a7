"""Follow contenders through many runs, and list what changed between them."""

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
"""What differs between two runs: its name, the old and the new value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunEntry:
    """A run as its history shows it.

    Attributes:
      started: when it began (ISO, in UTC); empty where that is not known.
      sources: names of its files.
      contenders: whether each contender conforms.
      info: what holds for the whole run.
      planned: the implementations that it was to judge.
    """

    started: str
    sources: tuple[str, ...]
    contenders: tuple[ContenderSummary, ...]
    info: RunInfo
    planned: frozenset[str] = frozenset()

    @property
    def time(self) -> str:
        """When it began, to the minute."""
        return self.started[:16].replace("T", " ") or UNTIMED

    @property
    def files(self) -> str:
        """The name of its first file, and how many more there are."""
        more = len(self.sources) - 1
        return self.sources[0] + (f" and {more} more" if more else "")


@dataclasses.dataclass(frozen=True)
class RunPoint:
    """A contender in one run.

    Attributes:
      number: of the run, from 1.
      entry: the run.
      summary: whether the contender conforms; none where it left no record.
      extent: how much of what was planned was asked.
      changed: what differs from its run before.
    """

    number: int
    entry: RunEntry
    summary: ContenderSummary | None
    extent: Extent
    changed: tuple[Changed, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether the contender was asked all that its level has."""
        return self.summary is not None and self.extent.is_whole

    @property
    def conformity(self) -> str:
        """The conformity of the records, however little was asked."""
        return self.summary.conformity if self.summary is not None else NOT_JUDGED

    @property
    def verdict(self) -> str:
        """The conformity in a word or two.

        Only a whole run of several checks says that something conforms.
        """
        if self.summary is None:
            return NO_RECORD
        is_narrow = not self.is_whole or self.summary.is_of_one_check
        if self.conformity in (CONFORMS, KNOWN_FAILURES) and is_narrow:
            return self.conformity.replace(CONFORMS, PASSES)
        return self.conformity

    @property
    def text(self) -> str:
        """The verdict as every other report words it."""
        return self.summary.text if self.summary is not None else NO_RECORD

    @property
    def asked(self) -> str:
        """How much was asked: `whole`, or why it was not."""
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
        """The level of its grid."""
        return self.extent.level or (UNKNOWN if not self.extent.known else self.entry.info.level)

    @property
    def counts(self) -> Counts:
        """Its records by verdict."""
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
        """The number of records that rest on a comparison."""
        return self.counts.judged

    @property
    def unsupported(self) -> int:
        """The number of records of what is declared unsupported, or refused."""
        return self.counts[UNSUPPORTED]

    @property
    def unjudged(self) -> int:
        """The number of records of what could not be judged."""
        return self.counts[UNJUDGED]

    @property
    def largest(self) -> float | None:
        """The largest judged figure as a share of its limit."""
        worst = self.summary.worst if self.summary is not None else None
        return worst.share if worst is not None else None

    @property
    def is_over(self) -> bool:
        """Whether the largest judged figure is beyond its limit."""
        return rank_share(self.largest) > 1

    @property
    def seconds(self) -> float:
        """What judging took, all processes together."""
        return self.summary.seconds if self.summary is not None else 0.0


@dataclasses.dataclass(frozen=True)
class RunTrack:
    """A contender through the runs that were to judge it, from the oldest to the newest."""

    contender: Contender
    points: tuple[RunPoint, ...]


def build_tracks(
    entries: Sequence[RunEntry], find_changed: Callable[[int, int, str], Sequence[Changed]]
) -> list[RunTrack]:
    """Follow each contender through the runs.

    Args:
      entries: runs in their order.
      find_changed: finds what differs between two runs, by their places, of what an implementation was judged under.
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
    """Find the run since which a contender fails; none if no run fails, or a whole one has conformed since.

    A red run fails, whole or not. Only a whole run says that something conforms. Later runs that asked less, or left no
    record, change nothing about a failure.
    """
    first = None
    for point in reversed(track.points):
        if point.conformity == DOES_NOT_CONFORM:
            first = point
        elif _is_conforming(point):
            break
    return first


def format_since(track: RunTrack) -> str:
    """Format the last verdict of a contender, and since when it holds.

    The text names the run since which a contender fails, or that failed last, and the last whole run that conformed.
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
    """Format what differs between two runs."""
    name, old, new = changed
    return f"{name} {old} → {new}" if old or new else name


def format_changed_briefly(changed: Changed) -> str:
    """Format what differs between two runs where there is little room: its name, and the new value if it is short."""
    name, _, new = changed
    return f"{name} {new}" if new not in ("", "none") and len(new) <= _MAX_VALUE else name


def format_history_headline(tracks: Sequence[RunTrack], entries: Sequence[RunEntry]) -> str:
    """Format all runs as one sentence."""
    runs = "1 run" if len(entries) == 1 else f"{len(entries):,} runs"
    red = [track.contender.label for track in tracks if find_failing_since(track) is not None]
    names = "1 implementation" if len(tracks) == 1 else f"{len(tracks):,} implementations"
    if not red:
        return f"{runs} of {names}: none is known to fail now."
    those = ", ".join(red[:3]) + (f" and {len(red) - 3:,} more" if len(red) > 3 else "")
    return f"{runs} of {names}: {those} {'fails' if len(red) == 1 else 'fail'}."
