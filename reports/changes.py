"""Compare the records of two runs, to find regressions of a kernel.

The result lists the judgements whose verdict changed, the judgements that the new run lacks, and the error ratios that
changed much. `reports.changes_page` renders the result.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set

from reports.causes.finding_text import FindingText
from reports.record_groups import JudgedImplementation, get_implementation, group_by
from reports.records import (
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

NEW_FAILURE = "new failure"
NEWLY_UNSUPPORTED = "newly unsupported"
NEWLY_UNJUDGED = "newly unjudged"
GONE = "gone"
FIXED = "fixed"
NEWLY_EXPECTED = "now an expected failure"
NEWLY_JUDGED = "newly judged"
NOT_JUDGED_AGAIN = "not judged again"
REGRESSIONS = (NEW_FAILURE, NEWLY_UNSUPPORTED, NEWLY_UNJUDGED, GONE)
KINDS = (*REGRESSIONS, FIXED, NEWLY_EXPECTED, NEWLY_JUDGED, NOT_JUDGED_AGAIN)
"""The kinds of change between two runs, regressions first.

`NOT_JUDGED_AGAIN` means that the new run did not plan the check of that case, so its outcome is unknown.
"""

SINGLE_SHIFT = 4.0
"""The factor by which a single error ratio must change to be reported. Other random values in a case change it less."""
COMMON_SHIFT = 1.25
"""The factor by which the ratios of a result must change in the median to be reported, over at least `MIN_CASES` cases.
"""
MIN_CASES = 20
MIN_SHARE = 0.2
"""The share of its limit that a single error ratio must reach, in the old or the new run, to be compared."""
_MIN_SHARE_OF_MANY = 0.01  # the same share for ratios that are compared by their median

Key = tuple[str, str, str, str, str]
"""The identity of a judgement: implementation, platform, case, check and observable."""
ChangeKey = tuple[str, str, str, str]
"""The key by which reports group changes: kind, label of the implementation, check and observable."""
Shares = list[tuple[Record, float, float]]
"""Items `(record of the new run, old ratio over its limit, new ratio over its limit)`."""


@dataclasses.dataclass(frozen=True)
class Change:
    """A judgement that differs between two runs; `old` or `new` is None if that run has no record of it."""

    kind: str
    old: Record | None
    new: Record | None

    @property
    def record(self) -> Record:
        """The record to show: the record of the new run, or the old run's if the new run has none."""
        found = self.new or self.old
        assert found is not None
        return found


@dataclasses.dataclass(frozen=True)
class RatioShift:
    """An error ratio that changed much between two runs.

    It is the ratio of one judgement, or the median over judgements of the same check, observable and dtype.

    Attributes:
      implementation, check, observable, dtype: those of the judgements.
      cases: the number of judgements; 1 for a single ratio.
      example: the id of the case whose ratio changed most.
      old, new: the ratio as a share of its limit, in the old and in the new run.
    """

    implementation: JudgedImplementation
    check: str
    observable: str
    dtype: str
    cases: int
    example: str
    old: float
    new: float

    @property
    def factor(self) -> float:
        """The new ratio divided by the old ratio."""
        return self.new / self.old if self.old else math.inf


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The differences between two runs, and the number of judgements that were compared."""

    changes: tuple[Change, ...]  # the judgements that changed, regressions first
    single_shifts: tuple[RatioShift, ...]  # single error ratios that changed much
    common_shifts: tuple[RatioShift, ...]  # results whose error ratios changed in the median
    compared: int  # how many judgements are in both runs
    # `old_total, new_total`: how many records each run has.
    old_total: int
    new_total: int
    # `old_findings, new_findings`: the causes of what is red in each run.
    old_findings: tuple[FindingText, ...] = ()
    new_findings: tuple[FindingText, ...] = ()

    @property
    def regressions(self) -> tuple[Change, ...]:
        """The changes for the worse, such as new failures."""
        return tuple(change for change in self.changes if change.kind in REGRESSIONS)

    @property
    def counts(self) -> dict[str, int]:
        """The number of changes of each kind that occurs."""
        counted = Counter(change.kind for change in self.changes)
        return {kind: counted[kind] for kind in KINDS if counted[kind]}


def compare_runs(old: Sequence[Record], new: Sequence[Record], *, planned: Set[tuple[str, str]] | None) -> Comparison:
    """Compare the records of two runs.

    If each run has only one implementation, the two are compared even if their names differ. So a kernel before and
    after a change may be two files. If each run has only one platform of an implementation, the platforms may differ
    too. So the runs may be on two chips.

    Args:
      old: records of the old run. All records of an implementation have the same provenance (code, versions, machine).
      new: records of the new run, with the same restriction.
      planned: pairs of case id and check that the new run planned to judge; None if that is unknown.
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
                # The old call raised, which left one record of the whole check. The new call returns results, and each
                # result has a record of its own.
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
    """Return the kind of change for a judgement that the new run has, or None if nothing changed.

    `reasons` has the old run's reasons for the cases that it did not judge.
    """
    if new.verdict in RED:
        return None if old is not None and old.verdict in RED else NEW_FAILURE
    judged_before = old is not None and old.verdict in JUDGED
    if new.verdict in (UNSUPPORTED, UNJUDGED):
        kind = NEWLY_UNSUPPORTED if new.verdict == UNSUPPORTED else NEWLY_UNJUDGED
        # A changed declaration changes the set of cases. A case that only the new run has counts as newly unsupported
        # only if its reason is new too.
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
    """Return the kind of change for a judgement that the new run lacks, or None if the old run did not judge it.

    Args:
      without_judgement: a record of the new run with the reason why the case was not judged, or None.
      asked: whether the new run planned this check of this case; true if its plan is unknown.
    """
    if old.verdict not in JUDGED and old.verdict not in RED:
        return None
    if without_judgement is not None:
        return NEWLY_UNSUPPORTED if without_judgement.verdict == UNSUPPORTED else NEWLY_UNJUDGED
    return GONE if asked else NOT_JUDGED_AGAIN


def _align_records(old: Sequence[Record], new: Sequence[Record]) -> tuple[dict[Key, Record], dict[Key, Record]]:
    """Index both runs' records by implementation and platform (empty if each has one), case, check and observable."""
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
    """Return the error ratio divided by its limit; None if the record did not pass, or has no finite ratio or limit."""
    if record.verdict != PASS or record.ratio is None or not record.limit or not math.isfinite(record.ratio):
        return None
    return record.ratio / record.limit


def _compute_shares(both: Iterable[tuple[Record, Record]], least: float) -> Shares:
    """Return the judgements whose ratio is at least `least` of its limit in one of the runs, with both shares."""
    found = []
    for old, new in both:
        before, after = _compute_share(old), _compute_share(new)
        if before is not None and after is not None and min(before, after) > 0 and max(before, after) >= least:
            found.append((new, before, after))
    return found


def _find_single_shifts(both: Iterable[tuple[Record, Record]]) -> list[RatioShift]:
    shifts = [
        RatioShift(get_implementation(r), r.check, r.observable, r.dtype, 1, r.case, old, new)
        for r, old, new in _compute_shares(both, MIN_SHARE)
        if not 1 / SINGLE_SHIFT <= new / old <= SINGLE_SHIFT
    ]
    return sorted(shifts, key=lambda shift: -shift.factor)


def _find_common_shifts(both: Iterable[tuple[Record, Record]]) -> list[RatioShift]:
    groups = group_by(
        _compute_shares(both, _MIN_SHARE_OF_MANY),
        lambda share: (get_implementation(share[0]), share[0].check, share[0].observable, share[0].dtype),
    )
    shifts = []
    for (implementation, check, observable, dtype), group in groups.items():
        if len(group) < MIN_CASES:
            continue
        factor = statistics.median(new / old for _, old, new in group)
        if not 1 / COMMON_SHIFT <= factor <= COMMON_SHIFT:
            old = statistics.median(old for _, old, _ in group)
            example = max(group, key=lambda share: share[2] / share[1])[0].case
            shifts.append(RatioShift(implementation, check, observable, dtype, len(group), example, old, old * factor))
    return sorted(shifts, key=lambda shift: -shift.factor)


@dataclasses.dataclass(frozen=True)
class ChangeGroup:
    """Changes of one kind that have one cause.

    Attributes:
      kind: one of `KINDS`.
      implementation: label of the implementation.
      title: the finding that explains the changes, or the reason that their records share.
      finding: that finding; None for changes that are no failures.
      changes: all of them.
    """

    kind: str
    implementation: str
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
        label = get_implementation(change.record).label
        if text is not None:
            return change.kind, label, text.title, text.number
        record = change.record
        reason = record.reason if change.new is not None and record.verdict in (UNSUPPORTED, UNJUDGED) else ""
        return change.kind, label, reason or f"{record.check}/{record.observable}", 0

    reported = (change for change in found.changes if change.kind not in (NOT_JUDGED_AGAIN, NEWLY_JUDGED))
    groups = []
    for (kind, label, title, number), changes in group_by(reported, find_cause).items():
        side = found.new_findings if kind == NEW_FAILURE else found.old_findings
        finding = next((text for text in side if number and text.number == number), None)
        groups.append(ChangeGroup(kind, label, title, finding, tuple(changes)))
    return sorted(
        groups, key=lambda group: (KINDS.index(group.kind), -len(group.changes), group.implementation, group.title)
    )


def list_reported_changes(found: Comparison) -> list[tuple[ChangeKey, list[Change]]]:
    """Group the changes that reports list, without judgements that only one run made: these say nothing of kernels."""
    return group_changes(change for change in found.changes if change.kind not in (NOT_JUDGED_AGAIN, NEWLY_JUDGED))


def group_changes(changes: Iterable[Change]) -> list[tuple[ChangeKey, list[Change]]]:
    """Group changes by kind, implementation, check and observable, the largest groups of a kind first."""
    groups = group_by(changes, _get_change_key)
    return sorted(groups.items(), key=lambda item: (KINDS.index(item[0][0]), -len(item[1]), item[0]))


def _get_change_key(change: Change) -> ChangeKey:
    record = change.record
    return change.kind, get_implementation(record).label, record.check, record.observable


def format_transition(change: Change) -> str:
    """Format the change of a judgement as `old verdict → new verdict`."""
    old = change.old.verdict if change.old is not None else "not there"
    new = change.new.verdict if change.new is not None else "not there"
    return f"{old} → {new}"


def format_changes_headline(found: Comparison) -> str:
    """Format the comparison of two runs as one sentence."""
    parts = [format_kind_count(count, kind) for kind, count in found.counts.items()]
    shifts = len(found.single_shifts) + len(found.common_shifts)
    parts += [f"{shifts:,} moved"] if shifts else []
    what = ", ".join(parts) if parts else "nothing changed"
    if found.regressions:
        return f"Regression: {what}."
    return f"No regression: {what}; {found.compared:,} judgements compared."


def format_kind_count(count: int, kind: str) -> str:
    """Format a number of changes with their kind, such as `2 new failures`."""
    plural = {NEW_FAILURE: "new failures", NEWLY_EXPECTED: "now expected failures"}
    return f"{count:,} {plural.get(kind, kind) if count > 1 else kind}"


def compare_environments(old: RunInfo, new: RunInfo) -> list[tuple[str, str, str]]:
    """Return `(name, old value, new value)` of each entry of the runs' environments, differing entries first."""
    names = dict.fromkeys((*old.environment, *new.environment))
    rows = [(name, old.environment.get(name, ""), new.environment.get(name, "")) for name in names]
    return sorted(rows, key=lambda row: row[1] == row[2])


def count_totals(old: Iterable[Record], new: Iterable[Record]) -> list[tuple[str, int, int]]:
    """Return `(verdict, number of old records, number of new records)` for each verdict."""
    counts: list[Mapping[str, int]] = [Counter(record.verdict for record in side) for side in (old, new)]
    return [(verdict, counts[0].get(verdict, 0), counts[1].get(verdict, 0)) for verdict in VERDICTS]
