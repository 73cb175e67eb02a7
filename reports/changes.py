"""What changed between two runs: judgements that turned, that are gone, and ratios that moved."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

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
from reports import conformity

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
"""A ratio that became larger or smaller by this factor moved more than other values move it."""
COMMON_SHIFT = 1.25
"""So did the ratios of a result, by this factor in the median over `ENOUGH` cases."""
MIN_CASES = 20
MIN_SHARE = 0.2
"""A single ratio is looked at if it is this share of its limit, before or after."""
_MIN_SHARE_OF_MANY = 0.01  # the same for ratios that are looked at together

Key = tuple[str, str, str, str, str]


@dataclasses.dataclass(frozen=True)
class Change:
    """A judgement that is not what it was; one of the two records may be missing."""

    kind: str
    old: Record | None
    new: Record | None

    @property
    def record(self) -> Record:
        """What there is to show: the new record, or the old one of what is gone."""
        found = self.new or self.old
        assert found is not None
        return found


@dataclasses.dataclass(frozen=True)
class RatioShift:
    """Ratios that moved: of one judgement, or in the median over the `cases` of a check, result and dtype."""

    contender: conformity.Contender
    check: str
    observable: str
    dtype: str
    cases: int
    example: str
    old: float
    new: float

    @property
    def factor(self) -> float:
        """How many times as large the new one is."""
        return self.new / self.old if self.old else math.inf


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All that changed, and how much was compared."""

    changes: tuple[Change, ...]
    moved_alone: tuple[RatioShift, ...]
    moved_together: tuple[RatioShift, ...]
    compared: int
    old_total: int
    new_total: int

    @property
    def regressions(self) -> tuple[Change, ...]:
        """The changes for the worse."""
        return tuple(change for change in self.changes if change.kind in REGRESSIONS)

    @property
    def counts(self) -> dict[str, int]:
        """How many changes there are of each kind that occurs."""
        counted = Counter(change.kind for change in self.changes)
        return {kind: counted[kind] for kind in KINDS if counted[kind]}

    def of_kind(self, kind: str) -> list[Change]:
        """The changes of a kind."""
        return [change for change in self.changes if change.kind == kind]


def compare_runs(old: Sequence[Record], new: Sequence[Record], *, planned: Set[tuple[str, str]] | None) -> Comparison:
    """What changed from the records `old` to `new`.

    Where each side has one implementation, or one platform of an implementation, names need not be the same: a kernel
    before and after may be two files, and two chips two platforms.

    Args:
      old: records of one provenance an implementation.
      new: likewise.
      planned: case and check of all that the new run planned to ask; none where that is unknown.
    """
    before, after = _align_records(old, new)
    reasons = {record.reason for record in old if record.verdict in (UNSUPPORTED, UNJUDGED)}
    instead = {record.case: record for record in new if record.verdict in (UNSUPPORTED, UNJUDGED)}
    answered: dict[tuple[str, ...], set[str]] = {}
    for key, record in after.items():
        answered.setdefault(key[:4], set()).add(record.verdict)
    found = []
    for key in sorted(before.keys() | after.keys()):
        one, other = before.get(key), after.get(key)
        if other is not None:
            kind = _classify_present(one, other, reasons)
        else:
            assert one is not None
            other = instead.get(one.case)
            if one.verdict == ERROR and (answers := answered.get(key[:4])) and not answers & RED:
                found.append(Change(FIXED, one, None))  # what raised has results now, under their own names
                continue
            kind = _classify_missing(one, other, asked=planned is None or (one.case, one.check) in planned)
        if kind is not None:
            found.append(Change(kind, one, other))
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
    """What became of a judgement that is there."""
    if new.verdict in RED:
        return None if old is not None and old.verdict in RED else NEW_FAILURE
    judged_before = old is not None and old.verdict in JUDGED
    if new.verdict in (UNSUPPORTED, UNJUDGED):
        kind = NEWLY_UNSUPPORTED if new.verdict == UNSUPPORTED else NEWLY_UNJUDGED
        # Another declaration makes another grid: cases that are new to it are declined for a reason that is new.
        newly = judged_before or (old is None and new.verdict == UNSUPPORTED and new.reason not in reasons)
        return kind if newly else None
    if old is None:
        return None
    if old.verdict in RED:
        return NEWLY_EXPECTED if new.verdict == EXPECTED_FAIL else FIXED
    if (old.verdict == EXPECTED_FAIL) != (new.verdict == EXPECTED_FAIL):
        return NEWLY_EXPECTED if new.verdict == EXPECTED_FAIL else FIXED
    return NEWLY_JUDGED if old.verdict in (UNSUPPORTED, UNJUDGED) else None


def _classify_missing(old: Record, instead: Record | None, *, asked: bool) -> str | None:
    """What became of a judgement that is there no more."""
    if old.verdict not in JUDGED and old.verdict not in RED:
        return None
    if instead is not None:
        return NEWLY_UNSUPPORTED if instead.verdict == UNSUPPORTED else NEWLY_UNJUDGED
    return GONE if asked else NOT_ASKED_AGAIN


def _align_records(old: Sequence[Record], new: Sequence[Record]) -> tuple[dict[Key, Record], dict[Key, Record]]:
    """Records of both sides by what they answer, names left out where there is nothing to tell apart."""
    sides = (old, new)
    alone = all(len({record.implementation for record in side}) == 1 for side in sides)

    def platforms(side: Sequence[Record], implementation: str) -> int:
        theirs = (r for r in side if (alone or r.implementation == implementation) and r.case != "*")
        return len({record.platform for record in theirs})

    names = {record.implementation for side in sides for record in side}
    anywhere = {name for name in names if all(platforms(side, name) == 1 for side in sides)}

    def key(record: Record) -> Key:
        name = "" if alone else record.implementation
        platform = "" if record.implementation in anywhere and record.case != "*" else record.platform
        return (name, platform, record.case, record.check, record.observable)

    found = tuple({key(record): record for record in side} for side in sides)
    return found[0], found[1]


def _compute_share(record: Record) -> float | None:
    if record.verdict != PASS or record.ratio is None or not record.limit or not math.isfinite(record.ratio):
        return None
    return record.ratio / record.limit


Shares = list[tuple[Record, float, float]]


def _compute_shares(both: Iterable[tuple[Record, Record]], least: float) -> Shares:
    """The new record, and both ratios as shares of their limits, where one of them is at least so much."""
    found = []
    for old, new in both:
        one, other = _compute_share(old), _compute_share(new)
        if one is not None and other is not None and min(one, other) > 0 and max(one, other) >= least:
            found.append((new, one, other))
    return found


def _find_single_shifts(both: Iterable[tuple[Record, Record]]) -> list[RatioShift]:
    moved = [
        RatioShift(conformity.get_contender(r), r.check, r.observable, r.dtype, 1, r.case, old, new)
        for r, old, new in _compute_shares(both, MIN_SHARE)
        if not 1 / SINGLE_SHIFT <= new / old <= SINGLE_SHIFT
    ]
    return sorted(moved, key=lambda one: -one.factor)


def _find_common_shifts(both: Iterable[tuple[Record, Record]]) -> list[RatioShift]:
    groups: dict[tuple[Any, ...], Shares] = {}
    for share in _compute_shares(both, _MIN_SHARE_OF_MANY):
        record = share[0]
        key = (conformity.get_contender(record), record.check, record.observable, record.dtype)
        groups.setdefault(key, []).append(share)
    moved = []
    for (contender, check, observable, dtype), group in groups.items():
        if len(group) < MIN_CASES:
            continue
        factor = statistics.median(new / old for _, old, new in group)
        if not 1 / COMMON_SHIFT <= factor <= COMMON_SHIFT:
            old = statistics.median(old for _, old, _ in group)
            example = max(group, key=lambda share: share[2] / share[1])[0].case
            moved.append(RatioShift(contender, check, observable, dtype, len(group), example, old, old * factor))
    return sorted(moved, key=lambda one: -one.factor)


def list_reported_changes(found: Comparison) -> list[tuple[tuple[str, str, str, str], list[Change]]]:
    """The groups that are told one by one: not those that say nothing of the kernel."""
    return group_changes(change for change in found.changes if change.kind not in (NOT_ASKED_AGAIN, NEWLY_JUDGED))


def group_changes(changes: Iterable[Change]) -> list[tuple[tuple[str, str, str, str], list[Change]]]:
    """Changes by kind, contender, check and result, the largest groups of a kind first."""
    groups: dict[tuple[str, str, str, str], list[Change]] = {}
    for change in changes:
        record = change.record
        label = conformity.get_contender(record).label
        groups.setdefault((change.kind, label, record.check, record.observable), []).append(change)
    return sorted(groups.items(), key=lambda item: (KINDS.index(item[0][0]), -len(item[1]), item[0]))


def format_transition(change: Change) -> str:
    """From which verdict to which."""
    old = change.old.verdict if change.old is not None else "not there"
    new = change.new.verdict if change.new is not None else "not there"
    return f"{old} → {new}"


def format_changes_headline(found: Comparison) -> str:
    """The whole comparison in one sentence."""
    parts = [format_kind_count(count, kind) for kind, count in found.counts.items()]
    moved = len(found.moved_alone) + len(found.moved_together)
    parts += [f"{moved:,} moved"] if moved else []
    what = ", ".join(parts) if parts else "nothing changed"
    if found.regressions:
        return f"Regression: {what}."
    return f"No regression: {what}; {found.compared:,} judgements compared."


def format_kind_count(count: int, kind: str) -> str:
    """How many changes of a kind, in words."""
    plural = {NEW_FAILURE: "new failures", NEWLY_EXPECTED: "now expected failures"}
    return f"{count:,} {plural.get(kind, kind) if count > 1 else kind}"


def compare_environments(old: RunInfo, new: RunInfo) -> list[tuple[str, str, str]]:
    """What is known of both runs, and what differs between them first."""
    names = dict.fromkeys((*old.environment, *new.environment))
    rows = [(name, old.environment.get(name, ""), new.environment.get(name, "")) for name in names]
    return sorted(rows, key=lambda row: row[1] == row[2])


def count_totals(old: Iterable[Record], new: Iterable[Record]) -> list[tuple[str, int, int]]:
    """Records of each verdict on both sides."""
    counts: list[Mapping[str, int]] = [Counter(record.verdict for record in side) for side in (old, new)]
    return [(verdict, counts[0].get(verdict, 0), counts[1].get(verdict, 0)) for verdict in VERDICTS]
