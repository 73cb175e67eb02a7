"""Format findings as annotations of GitHub Actions, in the syntax of its workflow commands."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from reports.causes.finding import RAISES, UNEXPECTED
from reports.causes.finding_text import FindingText, describe_finding
from reports.causes.root_causes import find_root_causes
from reports.changes import (
    NEW_FAILURE,
    REGRESSIONS,
    Change,
    Comparison,
    format_kind_count,
    format_transition,
    group_changes_by_cause,
)
from reports.conformity import IN_PART, summarize_implementations
from reports.record_groups import JudgedImplementation, get_implementation, group_by, group_records
from reports.records import Diagnosis, Proposal, Record, RunInfo
from reports.text_format import shorten_text

MAX_ANNOTATIONS = 10
"""The most annotations of one kind (error or warning) that GitHub shows for a step.

If there are more, the last annotation states how many are left out.
"""
ERROR_LEVEL, WARNING_LEVEL = "error", "warning"
_MAX_REASON = 300
_TITLE = "Attention conformance"

Place = tuple[str, int]
"""The path of a file, and a line number in it."""
FindPlace = Callable[[Record], Place | None]


@dataclasses.dataclass(frozen=True)
class Annotation:
    """A message that GitHub shows for a finding.

    Attributes:
      kind: `ERROR_LEVEL` or `WARNING_LEVEL`.
      implementation: label of the implementation (its name and platform).
      title: what is wrong.
      lines: the lines of the message; empty ones are left out.
      count: the number of records that the finding covers.
      place: the line of the user's code that raised the error, or None.
    """

    kind: str
    implementation: str
    title: str
    lines: tuple[str, ...]
    count: int
    place: Place | None = None


def annotate_records(
    records: Iterable[Record],
    find_place: FindPlace,
    probes: Iterable[Record] = (),
    diagnoses: Mapping[tuple[str, ...], Diagnosis] | None = None,
    proposals: Mapping[str, Proposal] | None = None,
) -> list[Annotation]:
    """Build an annotation for each finding among the red records of a run.

    An unexpected pass becomes a warning, and every other finding an error.

    Args:
      records: the records of a run.
      find_place: finds the line of the user's code that raised a record's error.
      probes: records of further cases, which were judged to confirm findings.
      diagnoses: the planted bugs that findings resemble, by the key of the finding.
      proposals: the declarations that were tried on findings, by the label of the implementation.
    """
    return [
        _build_annotation(
            describe_finding(
                number,
                finding,
                (diagnoses or {}).get(finding.key),
                (proposals or {}).get(finding.implementation.label),
            ),
            find_place,
        )
        for number, finding in enumerate(find_root_causes(records, probes), 1)
    ]


def annotate_changes(found: Comparison, find_place: FindPlace, *, without_failures: bool = False) -> list[Annotation]:
    """Build annotations for the regressions in a comparison of two runs.

    Args:
      found: the comparison.
      find_place: finds the line of the user's code that raised a record's error.
      without_failures: leave out new failures, which `annotate_records` annotates already.
    """
    failures: list[Annotation] = []
    if not without_failures:
        groups = [group for group in group_changes_by_cause(found) if group.kind == NEW_FAILURE]
        known = [
            dataclasses.replace(_build_annotation(group.finding, find_place), count=len(group.changes))
            for group in groups
            if group.finding is not None
        ]
        others = [change.new for group in groups if group.finding is None for change in group.changes if change.new]
        failures = [*known, *annotate_records(others, find_place)]
    annotations = [dataclasses.replace(one, title=f"new: {one.title}") for one in failures]
    changed = (change for change in found.regressions if change.kind != NEW_FAILURE)
    by_check = group_by(changed, _get_annotation_key)
    for (kind, implementation, check), group in sorted(by_check.items(), key=lambda one: REGRESSIONS.index(one[0][0])):
        record = group[0].record
        first = f"{format_kind_count(len(group), kind)}: {format_transition(group[0])}, as in {record.case}"
        lines = (first, shorten_text(record.reason, longest=_MAX_REASON), record.reproduce)
        title = f"{implementation.label}: {check} {kind}"
        annotations.append(Annotation(ERROR_LEVEL, implementation.label, title, lines, len(group)))
    return annotations


def annotate_uncalled(records: Iterable[Record], run: RunInfo) -> list[Annotation]:
    """Build an annotation for each implementation that conforms in part: operands got nothing or questions are open."""
    summaries = summarize_implementations(group_records(tuple(records)).by_implementation, run)
    return [
        Annotation(
            ERROR_LEVEL,
            one.implementation.label,
            f"{one.implementation.label}: "
            + (f"never called: {one.words.uncalled}" if one.words.uncalled else "questions are open"),
            (
                f"{one.implementation.label} {one.words.verdict}",
                *(["give them the contract's names, or declare `ignores`"] if one.words.uncalled else []),
                *one.words.open_questions,
            ),
            1,
        )
        for one in summaries
        if one.conformity == IN_PART
    ]


def format_commands(annotations: Sequence[Annotation]) -> list[str]:
    """Format annotations as workflow commands, one per line.

    At most `MAX_ANNOTATIONS` of each kind are formatted. Each implementation's first one comes before any second one.
    """
    found = []
    for kind in (ERROR_LEVEL, WARNING_LEVEL):
        ranked = _interleave_implementations([one for one in annotations if one.kind == kind])
        kept = ranked if len(ranked) <= MAX_ANNOTATIONS else ranked[: MAX_ANNOTATIONS - 1]
        found += [_format_command(one) for one in kept]
        if more := ranked[len(kept) :]:
            records = sum(one.count for one in more)
            text = f"{len(more):,} more findings ({records:,} records) are in the summary and the report"
            found.append(_format_command(Annotation(kind, "", _TITLE, (text,), records)))
    return found


def _get_annotation_key(change: Change) -> tuple[str, JudgedImplementation, str]:
    return change.kind, get_implementation(change.record), change.record.check


def _interleave_implementations(annotations: Sequence[Annotation]) -> list[Annotation]:
    """Order annotations: the first of each implementation, then the second of each, and so on.

    Then an implementation with many annotations cannot push out those of another.
    """
    ranks: Counter[str] = Counter()
    ranked = []
    for one in annotations:
        ranked.append((ranks[one.implementation], one))
        ranks[one.implementation] += 1
    return [one for _, one in sorted(ranked, key=lambda pair: pair[0])]


def _build_annotation(text: FindingText, find_place: FindPlace) -> Annotation:
    finding, label, smallest = text.finding, text.finding.implementation.label, text.finding.smallest
    reason = shorten_text(smallest.reason, longest=_MAX_REASON)
    lines = (*text.facts, *text.resemblance, f"smallest: {smallest.case}", reason, smallest.reproduce)
    kind = WARNING_LEVEL if finding.kind == UNEXPECTED else ERROR_LEVEL
    place = find_place(smallest) if finding.kind == RAISES else None
    return Annotation(kind, label, f"{label}: {text.title}", lines, len(finding.records), place)


def _format_command(one: Annotation) -> str:
    properties = [f"title={_escape_property(one.title)}"]
    if one.place is not None:
        file, line = one.place
        properties = [f"file={_escape_property(file)}", f"line={line}", *properties]
    message = "\n".join(filter(None, one.lines))
    return f"::{one.kind} {','.join(properties)}::{_escape_message(message)}"


def _escape_message(text: str) -> str:
    """Escape text for the message of a workflow command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    """Escape text for a property of a workflow command."""
    return _escape_message(text).replace(":", "%3A").replace(",", "%2C")
