"""Findings as annotations of GitHub Actions: one for each finding, in the syntax of its workflow commands."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from conformance.records import Record, printable
from reports import changes, wording
from reports.causes import roots, words
from reports.causes.finding import RAISES, UNEXPECTED, Finding
from reports.changes import NEW_FAILURE, REGRESSIONS, Comparison
from reports.summary import Contender, contender_of

MOST = 10
"""Annotations of a kind that GitHub shows of a step; the last says how many more there are."""
WRONG, NOTEWORTHY = "error", "warning"
_LONGEST = 300
_ROOT = "Attention conformance"

Place = tuple[str, int]
Placed = Callable[[Record], Place | None]


@dataclasses.dataclass(frozen=True)
class Annotation:
    """A finding: `count` records of `contender` say it; `place` is the line of the user's code that it is about."""

    kind: str
    contender: str
    title: str
    lines: tuple[str, ...]
    count: int
    place: Place | None = None


def of_records(records: Iterable[Record], placed: Placed, probes: Iterable[Record] = ()) -> list[Annotation]:
    """The findings of red records; `probes` were judged to confirm them.

    Expected failures are none. What passes unexpectedly is a warning.
    """
    return [_annotation(finding, placed) for finding in roots.of(records, probes)]


def of_changes(found: Comparison, placed: Placed, *, without_failures: bool = False) -> list[Annotation]:
    """The regressions of a comparison; new failures as those of a run, where these are not annotated already."""
    new = [change.new for change in found.of_kind(NEW_FAILURE) if change.new is not None]
    failures = [] if without_failures else of_records(new, placed)
    made = [dataclasses.replace(one, title=f"new: {one.title}") for one in failures]
    groups: dict[tuple[str, Contender, str], list[changes.Change]] = {}
    for change in found.regressions:
        if change.kind != NEW_FAILURE:
            key = (change.kind, contender_of(change.record), change.record.check)
            groups.setdefault(key, []).append(change)
    for (kind, contender, check), group in sorted(groups.items(), key=lambda item: REGRESSIONS.index(item[0][0])):
        first = group[0]
        lines = (f"{changes.counted(len(group), kind)}: {changes.turned_text(first)}, as in {first.record.case}",)
        told = (*lines, wording.shorten(first.record.reason, longest=_LONGEST), first.record.reproduce)
        title = f"{contender.label}: {check} {kind}"
        made.append(Annotation(WRONG, contender.label, title, told, len(group)))
    return made


def commands(annotations: Sequence[Annotation]) -> list[str]:
    """Workflow commands, a line each: of each kind as many as GitHub shows, every contender's foremost first."""
    found = []
    for kind in (WRONG, NOTEWORTHY):
        ranked = _in_turns([one for one in annotations if one.kind == kind])
        kept = ranked if len(ranked) <= MOST else ranked[: MOST - 1]
        found += [_command(one) for one in kept]
        if more := ranked[len(kept) :]:
            records = sum(one.count for one in more)
            text = f"{len(more):,} more findings ({records:,} records) are in the summary and the report"
            found.append(_command(Annotation(kind, "", _ROOT, (text,), records)))
    return found


def _in_turns(annotations: Sequence[Annotation]) -> list[Annotation]:
    """The first of each contender, then the second, and so on: no contender pushes another out."""
    ranks: Counter[str] = Counter()
    ranked = []
    for one in annotations:
        ranked.append((ranks[one.contender], one))
        ranks[one.contender] += 1
    return [one for _, one in sorted(ranked, key=lambda pair: pair[0])]


def _annotation(finding: Finding, placed: Placed) -> Annotation:
    label, smallest = finding.contender.label, finding.smallest
    reason = wording.shorten(smallest.reason, longest=_LONGEST)
    lines = (*words.facts(finding), f"smallest: {smallest.case}", reason, smallest.reproduce)
    kind = NOTEWORTHY if finding.kind == UNEXPECTED else WRONG
    place = placed(smallest) if finding.kind == RAISES else None
    return Annotation(kind, label, f"{label}: {words.title(finding)}", lines, len(finding.records), place)


def _command(one: Annotation) -> str:
    properties = [f"title={_property(one.title)}"]
    if one.place is not None:
        file, line = one.place
        properties = [f"file={_property(file)}", f"line={line}", *properties]
    message = "\n".join(printable(line) for line in one.lines if line)
    return f"::{one.kind} {','.join(properties)}::{_data(message)}"


def _data(text: str) -> str:
    """Text as GitHub's commands take it for a message."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """Text as they take it for a property."""
    return _data(printable(text)).replace(":", "%3A").replace(",", "%2C")
