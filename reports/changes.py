"""Compare two runs: judgements whose verdict changed, judgements that are gone, and ratios that moved."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set

from conformance.records import (
    ERROR,
    EXPECTED_FAIL,
    JUDGED,
    PASS,
    RED,
    UNJUDGED,
    UNSUPPORTED,
    VERDICTS,
    Record,
    RunInfo,
)
from reports.causes.finding_text import FindingText
from reports.record_groups import Contender, get_contender, group_by

NEW_FAILURE = "new failure"
NEWLY_UNSUPPORTED = "newly unsupported"
NEWLY_UNJUDGED = "newly unjudged"
GONE = "gone"
FIXED = "fixed"
NEWLY_EXPECTED = "now an expected failure"
NEWLY_JUDGED = "newly judged"
NOT_ASKED_AGAIN = "not asked again"
REGRESSIONS = (NEW_FAILURE, NEWLY_UNSUPPORTED, NEWLY_UNJUDGED, GONE)
KINDS = (*REGRESSIONS, FIXED, NEWLY_EXPECTED, NEWLY_JUDGED, NOT_ASKED_AGAIN)
"""What can become of a judgement, regressions first. What was not asked again may be as it was."""

SINGLE_SHIFT = 4.0
"""The factor by which a single ratio must move: other values of a case move it less."""
COMMON_SHIFT = 1.25
"""The factor by which the ratios of a result must move, in the median over `MIN_CASES` or more."""
MIN_CASES = 20
MIN_SHARE = 0.2
"""The share of its limit that a single ratio must have, before or after, to be compared."""
_MIN_SHARE_OF_MANY = 0.01  # the same for ratios that are compared together

Key = tuple[str, str, str, str, str]
"""What a judgement answers: implementation, platform, case, check and observable."""
ChangeKey = tuple[str, str, str, str]
"""What changes are grouped by: kind, label of the contender, check and observable."""
Shares = list[tuple[Record, float, float]]
"""New records, each with the old and the new ratio as a share of its limit."""


@dataclasses.dataclass(frozen=True)
class Change:
    """A judgement that is not what it was; one of the two records may be missing."""

    kind: str
    old: Record | None
    new: Record | None

    @property
    def record(self) -> Record:
        """The record to show: the new one, or the old one of what is gone."""
        found = self.new or self.old
        assert found is not None
        return found


@dataclasses.dataclass(frozen=True)
class RatioShift:
    """Ratios that moved.

    They are of one judgement, or in the median over the `cases` of a check, result and dtype.

    Attributes:
      contender, check, observable, dtype: what the judgements share.
      cases: how many judgements there are.
      example: the case whose ratio moved furthest.
      old, new: the ratio as a share of its limit, before and after.
    """

    contender: Contender
    check: str
    observable: str
    dtype: str
    cases: int
    example: str
    old: float
    new: float

    @property
    def factor(self) -> float:
        """The new ratio over the old one."""
        return self.new / self.old if self.old else math.inf


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All that changed, and how much was compared.

    Attributes:
      changes: the judgements that changed, regressions first.
      single_shifts: single ratios that moved.
      common_shifts: results whose ratios moved together.
      compared: how many judgements are in both runs.
      old_total, new_total: how many records each run has.
      old_findings, new_findings: the causes of what is red in each run.
    """

    changes: tuple[Change, ...]
    single_shifts: tuple[RatioShift, ...]
    common_shifts: tuple[RatioShift, ...]
    compared: int
    old_total: int
    new_total: int
    old_findings: tuple[FindingText, ...] = ()
    new_findings: tuple[FindingText, ...] = ()

    @property
    def regressions(self) -> tuple[Change, ...]:
        """The changes for the worse."""
        return tuple(change for change in self.changes if change.kind in REGRESSIONS)

    @property
    def counts(self) -> dict[str, int]:
        """How many changes there are of each kind that occurs."""
        counted = Counter(change.kind for change in self.changes)
        return {kind: counted[kind] for kind in KINDS if counted[kind]}

    def list_changes(self, kind: str) -> list[Change]:
        """Return the changes of a kind."""
        return [change for change in self.changes if change.kind == kind]


def compare_runs(old: Sequence[Record], new: Sequence[Record], *, planned: Set[tuple[str, str]] | None) -> Comparison:
    """Compare the records of two runs.

    If each side has one implementation, its name may differ: a kernel before and after may be two files. If each side
    has one platform of an implementation, that may differ too: the runs may be of two chips.

    Args:
      old: records of one provenance for each implementation.
      new: likewise.
      planned: case and check of all that the new run planned to judge; none where that is unknown.
    """
    before, after = _align_records(old, new)
    reasons = {record.reason for record in old if record.verdict in (UNSUPPORTED, UNJUDGED)}
    without_judgement = {record.case: record for record in new if record.verdict in (UNSUPPORTED, UNJUDGED)}
    answers: dict[tuple[str, ...], set[str]] = {}
    for key, record in after.items():
        answers.setdefault(key[:4], set()).add(record.verdict)
    found = []
    for key in sorted(before.keys() | after.keys()):
        earlier, later = before.get(key), after.get(key)
        if later is not None:
            kind = _classify_present(earlier, later, reasons)
        else:
            assert earlier is not None
            later = without_judgement.get(earlier.case)
            if earlier.verdict == ERROR and (verdicts := answers.get(key[:4])) and not verdicts & RED:
                # What raised has results, under their own names.
                found.append(Change(FIXED, earlier, None))
                continue
            asked = planned is None or (earlier.case, earlier.check) in planned
            kind = _classify_missing(earlier, later, asked=asked)
        if kind is not None:
            found.append(Change(kind, earlier, later))
    both = [(before[key], after[key]) for key in sorted(before.keys() & after.keys())]
    return Comparison(
        tuple(sorted(found, key=lambda change: KINDS.index(change.kind))),
        tuple(_find_single_shifts(both)),
        tuple(_find_common_shifts(both)),
        len(both),
        len(old),
        len(new),
    )


def _classify_present(old: Record | None, new: Record, reasons: set[str]) -> str | None:
    """Return the kind of change of a judgement that the new run has; none if it is no change.

    Args:
      old: its record in the old run, if there is one.
      new: its record in the new run.
      reasons: why records of the old run have no judgement.
    """
    if new.verdict in RED:
        return None if old is not None and old.verdict in RED else NEW_FAILURE
    judged_before = old is not None and old.verdict in JUDGED
    if new.verdict in (UNSUPPORTED, UNJUDGED):
        kind = NEWLY_UNSUPPORTED if new.verdict == UNSUPPORTED else NEWLY_UNJUDGED
        # Another declaration makes another grid: cases that are new to it are unsupported for a reason that is new.
        newly = judged_before or (old is None and new.verdict == UNSUPPORTED and new.reason not in reasons)
        return kind if newly else None
    if old is None:
        return None
    if old.verdict in RED:
        return NEWLY_EXPECTED if new.verdict == EXPECTED_FAIL else FIXED
    if (old.verdict == EXPECTED_FAIL) != (new.verdict == EXPECTED_FAIL):
        return NEWLY_EXPECTED if new.verdict == EXPECTED_FAIL else FIXED
    return NEWLY_JUDGED if old.verdict in (UNSUPPORTED, UNJUDGED) else None


def _classify_missing(old: Record, without_judgement: Record | None, *, asked: bool) -> str | None:
    """Return the kind of change of a judgement that the new run lacks; none if it was no judgement.

    Args:
      old: its record in the old run.
      without_judgement: a record of the new run that gives a reason why the case was not judged.
      asked: whether the new run planned to judge it, as far as is known.
    """
    if old.verdict not in JUDGED and old.verdict not in RED:
        return None
    if without_judgement is not None:
        return NEWLY_UNSUPPORTED if without_judgement.verdict == UNSUPPORTED else NEWLY_UNJUDGED
    return GONE if asked else NOT_ASKED_AGAIN


def _align_records(old: Sequence[Record], new: Sequence[Record]) -> tuple[dict[Key, Record], dict[Key, Record]]:
    """Return the records of both sides by what they answer.

    Names of implementations and platforms are empty where each side has only one.
    """
    sides = (old, new)
    is_single = all(len({record.implementation for record in side}) == 1 for side in sides)

    def count_platforms(side: Sequence[Record], implementation: str) -> int:
        own = (r for r in side if (is_single or r.implementation == implementation) and r.case != "*")
        return len({record.platform for record in own})

    names = {record.implementation for side in sides for record in side}
    of_one_platform = {name for name in names if all(count_platforms(side, name) == 1 for side in sides)}

    def build_key(record: Record) -> Key:
        name = "" if is_single else record.implementation
        platform = "" if record.implementation in of_one_platform and record.case != "*" else record.platform
        return (name, platform, record.case, record.check, record.observable)

    before, after = ({build_key(record): record for record in side} for side in sides)
    return before, after


def _compute_share(record: Record) -> float | None:
    """Return the ratio of a pass as a share of its limit.

    The result is none if it has no finite ratio or no limit.
    """
    if record.verdict != PASS or record.ratio is None or not record.limit or not math.isfinite(record.ratio):
        return None
    return record.ratio / record.limit


def _compute_shares(both: Iterable[tuple[Record, Record]], least: float) -> Shares:
    """Return the judgements of which one share is at least so much, with both shares."""
    found = []
    for old, new in both:
        before, after = _compute_share(old), _compute_share(new)
        if before is not None and after is not None and min(before, after) > 0 and max(before, after) >= least:
            found.append((new, before, after))
    return found


def _find_single_shifts(both: Iterable[tuple[Record, Record]]) -> list[RatioShift]:
    shifts = [
        RatioShift(get_contender(r), r.check, r.observable, r.dtype, 1, r.case, old, new)
        for r, old, new in _compute_shares(both, MIN_SHARE)
        if not 1 / SINGLE_SHIFT <= new / old <= SINGLE_SHIFT
    ]
    return sorted(shifts, key=lambda shift: -shift.factor)


def _find_common_shifts(both: Iterable[tuple[Record, Record]]) -> list[RatioShift]:
    groups = group_by(
        _compute_shares(both, _MIN_SHARE_OF_MANY),
        lambda share: (get_contender(share[0]), share[0].check, share[0].observable, share[0].dtype),
    )
    shifts = []
    for (contender, check, observable, dtype), group in groups.items():
        if len(group) < MIN_CASES:
            continue
        factor = statistics.median(new / old for _, old, new in group)
        if not 1 / COMMON_SHIFT <= factor <= COMMON_SHIFT:
            old = statistics.median(old for _, old, _ in group)
            example = max(group, key=lambda share: share[2] / share[1])[0].case
            shifts.append(RatioShift(contender, check, observable, dtype, len(group), example, old, old * factor))
    return sorted(shifts, key=lambda shift: -shift.factor)


@dataclasses.dataclass(frozen=True)
class ChangeGroup:
    """Changes of one kind that have one cause.

    Attributes:
      kind: one of `KINDS`.
      contender: label of the contender.
      title: the finding that explains the changes, or the reason that their records share.
      finding: that finding; None for changes that are no failures.
      changes: all of them.
    """

    kind: str
    contender: str
    title: str
    finding: FindingText | None
    changes: tuple[Change, ...]

    @property
    def cases(self) -> int:
        """How many cases changed."""
        return len({change.record.case for change in self.changes})


def group_changes_by_cause(found: Comparison) -> list[ChangeGroup]:
    """Group the changes that are reported by their causes, regressions first.

    New failures are grouped by the findings of the new run, and fixed ones by those of the old run. Other changes are
    grouped by the reason of their records.
    """
    by_record = [
        {record.key: text for text in side for record in text.finding.records}
        for side in (found.old_findings, found.new_findings)
    ]

    def find_cause(change: Change) -> tuple[str, str, str, int]:
        text = None
        if change.kind == NEW_FAILURE and change.new is not None:
            text = by_record[1].get(change.new.key)
        elif change.kind == FIXED and change.old is not None:
            text = by_record[0].get(change.old.key)
        label = get_contender(change.record).label
        if text is not None:
            return change.kind, label, text.title, text.number
        record = change.record
        reason = record.reason if change.new is not None and record.verdict in (UNSUPPORTED, UNJUDGED) else ""
        return change.kind, label, reason or f"{record.check}/{record.observable}", 0

    reported = (change for change in found.changes if change.kind not in (NOT_ASKED_AGAIN, NEWLY_JUDGED))
    groups = []
    for (kind, label, title, number), changes in group_by(reported, find_cause).items():
        side = found.new_findings if kind == NEW_FAILURE else found.old_findings
        finding = next((text for text in side if number and text.number == number), None)
        groups.append(ChangeGroup(kind, label, title, finding, tuple(changes)))
    return sorted(
        groups, key=lambda group: (KINDS.index(group.kind), -len(group.changes), group.contender, group.title)
    )


def list_reported_changes(found: Comparison) -> list[tuple[ChangeKey, list[Change]]]:
    """Group the changes that are reported one by one.

    Left out are changes of what was asked, which do not concern the kernel.
    """
    return group_changes(change for change in found.changes if change.kind not in (NOT_ASKED_AGAIN, NEWLY_JUDGED))


def group_changes(changes: Iterable[Change]) -> list[tuple[ChangeKey, list[Change]]]:
    """Group changes by kind, contender, check and observable, the largest groups of a kind first."""
    groups = group_by(changes, _get_change_key)
    return sorted(groups.items(), key=lambda item: (KINDS.index(item[0][0]), -len(item[1]), item[0]))


def _get_change_key(change: Change) -> ChangeKey:
    record = change.record
    return change.kind, get_contender(record).label, record.check, record.observable


def format_transition(change: Change) -> str:
    """Format from which verdict to which a judgement changed."""
    old = change.old.verdict if change.old is not None else "not there"
    new = change.new.verdict if change.new is not None else "not there"
    return f"{old} → {new}"


def format_changes_headline(found: Comparison) -> str:
    """Format the whole comparison as one sentence."""
    parts = [format_kind_count(count, kind) for kind, count in found.counts.items()]
    shifts = len(found.single_shifts) + len(found.common_shifts)
    parts += [f"{shifts:,} moved"] if shifts else []
    what = ", ".join(parts) if parts else "nothing changed"
    if found.regressions:
        return f"Regression: {what}."
    return f"No regression: {what}; {found.compared:,} judgements compared."


def format_kind_count(count: int, kind: str) -> str:
    """Format how many changes of a kind there are."""
    plural = {NEW_FAILURE: "new failures", NEWLY_EXPECTED: "now expected failures"}
    return f"{count:,} {plural.get(kind, kind) if count > 1 else kind}"


def compare_environments(old: RunInfo, new: RunInfo) -> list[tuple[str, str, str]]:
    """Return name, old and new value of what is known of both environments, what differs first."""
    names = dict.fromkeys((*old.environment, *new.environment))
    rows = [(name, old.environment.get(name, ""), new.environment.get(name, "")) for name in names]
    return sorted(rows, key=lambda row: row[1] == row[2])


def count_totals(old: Iterable[Record], new: Iterable[Record]) -> list[tuple[str, int, int]]:
    """Return each verdict with its number of records on both sides."""
    counts: list[Mapping[str, int]] = [Counter(record.verdict for record in side) for side in (old, new)]
    return [(verdict, counts[0].get(verdict, 0), counts[1].get(verdict, 0)) for verdict in VERDICTS]
