"""Findings as annotations of GitHub Actions: one for each finding, in the syntax of its workflow commands."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from conformance.records import Record, make_printable
from reports import changes, text_format
from reports.causes import finding_text, root_causes
from reports.causes.finding import RAISES, UNEXPECTED, Finding
from reports.changes import NEW_FAILURE, REGRESSIONS, Comparison
from reports.conformity import Contender, get_contender

MAX_ANNOTATIONS = 10
"""Annotations of a kind that GitHub shows of a step; the last says how many more there are."""
ERROR_LEVEL, WARNING_LEVEL = "error", "warning"
_MAX_REASON = 300
_TITLE = "Attention conformance"

Place = tuple[str, int]
FindPlace = Callable[[Record], Place | None]


@dataclasses.dataclass(frozen=True)
class Annotation:
    """A finding: `count` records of `contender` say it; `place` is the line of the user's code that it is about."""

    kind: str
    contender: str
    title: str
    lines: tuple[str, ...]
    count: int
    place: Place | None = None


def annotate_records(records: Iterable[Record], placed: FindPlace, probes: Iterable[Record] = ()) -> list[Annotation]:
    """The findings of red records; `probes` were judged to confirm them.

    Expected failures are none. What passes unexpectedly is a warning.
    """
    return [_build_annotation(finding, placed) for finding in root_causes.find_root_causes(records, probes)]


def annotate_changes(found: Comparison, placed: FindPlace, *, without_failures: bool = False) -> list[Annotation]:
    """The regressions of a comparison; new failures as those of a run, where these are not annotated already."""
    new = [change.new for change in found.of_kind(NEW_FAILURE) if change.new is not None]
    failures = [] if without_failures else annotate_records(new, placed)
    made = [dataclasses.replace(one, title=f"new: {one.title}") for one in failures]
    groups: dict[tuple[str, Contender, str], list[changes.Change]] = {}
    for change in found.regressions:
        if change.kind != NEW_FAILURE:
            key = (change.kind, get_contender(change.record), change.record.check)
            groups.setdefault(key, []).append(change)
    for (kind, contender, check), group in sorted(groups.items(), key=lambda item: REGRESSIONS.index(item[0][0])):
        first = group[0]
        lines = (
            f"{changes.format_kind_count(len(group), kind)}: {changes.format_transition(first)}, as in {first.record.case}",
        )
        told = (*lines, text_format.shorten(first.record.reason, longest=_MAX_REASON), first.record.reproduce)
        title = f"{contender.label}: {check} {kind}"
        made.append(Annotation(ERROR_LEVEL, contender.label, title, told, len(group)))
    return made


def format_commands(annotations: Sequence[Annotation]) -> list[str]:
    """Workflow commands, a line each: of each kind as many as GitHub shows, every contender's foremost first."""
    found = []
    for kind in (ERROR_LEVEL, WARNING_LEVEL):
        ranked = _interleave_contenders([one for one in annotations if one.kind == kind])
        kept = ranked if len(ranked) <= MAX_ANNOTATIONS else ranked[: MAX_ANNOTATIONS - 1]
        found += [_format_command(one) for one in kept]
        if more := ranked[len(kept) :]:
            records = sum(one.count for one in more)
            text = f"{len(more):,} more findings ({records:,} records) are in the summary and the report"
            found.append(_format_command(Annotation(kind, "", _TITLE, (text,), records)))
    return found


def _interleave_contenders(annotations: Sequence[Annotation]) -> list[Annotation]:
    """The first of each contender, then the second, and so on: no contender pushes another out."""
    ranks: Counter[str] = Counter()
    ranked = []
    for one in annotations:
        ranked.append((ranks[one.contender], one))
        ranks[one.contender] += 1
    return [one for _, one in sorted(ranked, key=lambda pair: pair[0])]


def _build_annotation(finding: Finding, placed: FindPlace) -> Annotation:
    label, smallest = finding.contender.label, finding.smallest
    reason = text_format.shorten(smallest.reason, longest=_MAX_REASON)
    lines = (*finding_text.list_facts(finding), f"smallest: {smallest.case}", reason, smallest.reproduce)
    kind = WARNING_LEVEL if finding.kind == UNEXPECTED else ERROR_LEVEL
    place = placed(smallest) if finding.kind == RAISES else None
    return Annotation(kind, label, f"{label}: {finding_text.format_title(finding)}", lines, len(finding.records), place)


def _format_command(one: Annotation) -> str:
    properties = [f"title={_escape_property(one.title)}"]
    if one.place is not None:
        file, line = one.place
        properties = [f"file={_escape_property(file)}", f"line={line}", *properties]
    message = "\n".join(make_printable(line) for line in one.lines if line)
    return f"::{one.kind} {','.join(properties)}::{_escape_message(message)}"


def _escape_message(text: str) -> str:
    """Text as GitHub's commands take it for a message."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    """Text as they take it for a property."""
    return _escape_message(make_printable(text)).replace(":", "%3A").replace(",", "%2C")
