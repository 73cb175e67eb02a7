"""Many runs in their order: how each contender fared from one to the next, and what was not the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from conformance.records import ERROR, FAIL, UNEXPECTED_PASS, UNJUDGED, UNSUPPORTED, Extent, RunInfo
from reports import conformity, text_format
from reports.conformity import CONFORMS, DOES_NOT_CONFORM, KNOWN_FAILURES, NOT_JUDGED, Contender, Counts, Standing

WHOLE = "whole"
UNKNOWN = "unknown"
NO_RECORD = "no record"
PASSES = "passes"
UNTIMED = "unknown"
_MAX_VALUE = 10

Changed = tuple[str, str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunEntry:
    """A run: when it began (ISO, in UTC; empty where that is not known), its files, and what a report says of it.

    Of its records, what they add up to is enough. `planned` are the implementations that it was to judge.
    """

    started: str
    sources: tuple[str, ...]
    standings: tuple[Standing, ...]
    info: RunInfo
    planned: frozenset[str] = frozenset()

    @property
    def time(self) -> str:
        """When it began, to the minute."""
        return self.started[:16].replace("T", " ") or UNTIMED

    @property
    def files(self) -> str:
        """The names of its files, in short."""
        more = len(self.sources) - 1
        return self.sources[0] + (f" and {more} more" if more else "")


@dataclasses.dataclass(frozen=True)
class RunPoint:
    """A contender in one run; `number` is the run's, from 1, and `standing` is none where it left no record there."""

    number: int
    entry: RunEntry
    standing: Standing | None
    extent: Extent
    changed: tuple[Changed, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether all that its level asks was asked."""
        return self.standing is not None and self.extent.is_whole

    @property
    def conformity(self) -> str:
        """As the standing has it."""
        return self.standing.conformity if self.standing is not None else NOT_JUDGED

    @property
    def verdict(self) -> str:
        """In a word or two: only a whole run of several checks says that something conforms."""
        if self.standing is None:
            return NO_RECORD
        narrow = not self.is_whole or self.standing.one_check
        if self.conformity in (CONFORMS, KNOWN_FAILURES) and narrow:
            return self.conformity.replace(CONFORMS, PASSES)
        return self.conformity

    @property
    def words(self) -> str:
        """The verdict as every other report words it."""
        return text_format.format_standing(self.standing, self.entry.info) if self.standing is not None else NO_RECORD

    @property
    def asked(self) -> str:
        """How much was asked, in a word: `whole`, or why it was not."""
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
        """Records by verdict."""
        return self.standing.counts if self.standing is not None else Counts({})

    @property
    def failures(self) -> int:
        """What was judged and is red."""
        return self.counts[FAIL] + self.counts[UNEXPECTED_PASS]

    @property
    def errors(self) -> int:
        """What raised."""
        return self.counts[ERROR]

    @property
    def judged(self) -> int:
        """What rests on a comparison."""
        return self.counts.judged

    @property
    def unsupported(self) -> int:
        """What is declined."""
        return self.counts[UNSUPPORTED]

    @property
    def unjudged(self) -> int:
        """What could not be judged."""
        return self.counts[UNJUDGED]

    @property
    def largest(self) -> float | None:
        """The largest figure as a share of its limit."""
        worst = self.standing.worst if self.standing is not None else None
        return worst.share if worst is not None else None

    @property
    def seconds(self) -> float:
        """What judging took, all processes together."""
        return self.standing.seconds if self.standing is not None else 0.0


@dataclasses.dataclass(frozen=True)
class RunTrack:
    """A contender through the runs that were to judge it, from the oldest to the newest."""

    contender: Contender
    points: tuple[RunPoint, ...]


def build_tracks(entries: Sequence[RunEntry], changed: Callable[[int, int, str], Sequence[Changed]]) -> list[RunTrack]:
    """How each contender fared.

    Args:
      entries: runs in their order.
      changed: what two runs, by their places, do not share of what an implementation was judged under.
    """
    standings = [{one.contender: one for one in entry.standings} for entry in entries]
    contenders = sorted({contender for found in standings for contender in found})
    met = {contender.implementation for contender in contenders}
    contenders += sorted(Contender(name, "") for name in {n for entry in entries for n in entry.planned} - met)
    made = []
    for contender in contenders:
        places = [n for n, entry in enumerate(entries) if contender in standings[n] or _has_no_record(contender, entry)]
        points = []
        for before, place in zip([None, *places], places, strict=False):
            standing, entry = standings[place].get(contender), entries[place]
            known = _find_extent(contender, standing, entry)
            differs = changed(before, place, contender.implementation) if before is not None else ()
            points.append(RunPoint(place + 1, entry, standing, known, tuple(differs)))
        made.append(RunTrack(contender, tuple(points)))
    return made


def _has_no_record(contender: Contender, entry: RunEntry) -> bool:
    """Whether a run was to judge an implementation and left no record of it, on any platform."""
    name = contender.implementation
    return name in entry.planned and not any(one.contender.implementation == name for one in entry.standings)


def _find_extent(contender: Contender, standing: Standing | None, entry: RunEntry) -> Extent:
    if standing is not None:
        return text_format.find_extent(standing, entry.info)
    return Extent(level=entry.info.level, stopped=entry.info.interrupted, planned=1)


def find_failing_since(track: RunTrack) -> RunPoint | None:
    """The run since which a contender fails; none if no run here fails, or a whole one has conformed since.

    A red run fails, whole or not. Only a whole run says that something conforms: later runs that asked less, or left no
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
    """How a contender stands in the last run, since when it fails or failed last, and when it last conformed."""
    last = track.points[-1]
    parts = [f"{last.words} in run {last.number}"]
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
    """What changed between two runs."""
    name, old, new = changed
    return f"{name} {old} → {new}" if old or new else name


def format_changed_briefly(changed: Changed) -> str:
    """The same where there is little room."""
    name, _, new = changed
    return f"{name} {new}" if new not in ("", "none") and len(new) <= _MAX_VALUE else name


def format_history_headline(made: Sequence[RunTrack], entries: Sequence[RunEntry]) -> str:
    """All runs in one sentence."""
    runs = "1 run" if len(entries) == 1 else f"{len(entries):,} runs"
    red = [track.contender.label for track in made if find_failing_since(track) is not None]
    names = "1 implementation" if len(made) == 1 else f"{len(made):,} implementations"
    if not red:
        return f"{runs} of {names}: none is known to fail now."
    those = ", ".join(red[:3]) + (f" and {len(red) - 3:,} more" if len(red) > 3 else "")
    return f"{runs} of {names}: {those} {'fails' if len(red) == 1 else 'fail'}."


def rank_point(point: RunPoint) -> float:
    """The largest share, for drawing: without any below all."""
    return conformity.rank_share(point.largest)
