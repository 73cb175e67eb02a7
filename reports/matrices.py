"""Matrices: contenders by features and by checks, and what each cell says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from conformance.records import EXPECTED_FAIL, PASS, UNJUDGED, UNSUPPORTED, Record
from reports.columns import CHECK_KINDS, FEATURE_KINDS, grouped
from reports.summary import Contender, Counts, Metric, by_contender, contender_of, count, worst_metric

NO_FEATURE = "(none named)"
"""The matrix column of records that name no feature, so that no record is missing from the matrix."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """What one contender did in one column of a matrix."""

    counts: Counts
    worst: Metric | None
    reasons: tuple[str, ...]

    @property
    def state(self) -> str:
        """The one word that colours the cell: fail, expected, pass, unjudged, unsupported or absent."""
        if self.counts.red:
            return "fail"
        if self.counts[PASS]:
            return "pass"
        if self.counts[EXPECTED_FAIL]:
            return "expected"
        if self.counts[UNJUDGED]:
            return "unjudged"
        return "unsupported" if self.counts[UNSUPPORTED] else "absent"


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Contenders by columns, which stand in groups of a kind; a pair without records has no cell."""

    contenders: tuple[Contender, ...]
    groups: tuple[tuple[str, tuple[str, ...]], ...]
    cells: Mapping[tuple[Contender, str], Cell]

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns, in order."""
        return tuple(column for _, columns in self.groups for column in columns)


def features_in_order(records: Iterable[Record]) -> tuple[str, ...]:
    """Features in the order of first appearance, and `NO_FEATURE` last where a record names none."""
    seen: dict[str, None] = {}
    unnamed = False
    for record in records:
        seen.update(dict.fromkeys(record.features))
        unnamed = unnamed or not record.features
    return (*seen, NO_FEATURE) if unnamed else tuple(seen)


def feature_matrix(records: Sequence[Record]) -> Matrix:
    """Contenders by features; a record counts once in the column of each of its features."""
    groups = grouped(features_in_order(records), FEATURE_KINDS)
    return _matrix(records, groups, lambda record: set(record.features) or {NO_FEATURE})


def check_matrix(records: Sequence[Record]) -> Matrix:
    """Contenders by checks."""
    groups = grouped((record.check for record in records), CHECK_KINDS)
    return _matrix(records, groups, lambda record: {record.check})


def _matrix(
    records: Sequence[Record],
    kinds: Iterable[tuple[str, tuple[str, ...]]],
    place: Callable[[Record], Iterable[str]],
) -> Matrix:
    groups: dict[tuple[Contender, str], list[Record]] = {}
    for record in records:
        for column in place(record):
            groups.setdefault((contender_of(record), column), []).append(record)
    cells = {key: Cell(count(group), worst_metric(group), _reasons(group)) for key, group in groups.items()}
    return Matrix(tuple(by_contender(records)), tuple(kinds), cells)


def _reasons(records: Iterable[Record], *, cap: int = 3) -> tuple[str, ...]:
    found = dict.fromkeys(r.reason for r in records if r.reason and r.verdict in (UNSUPPORTED, UNJUDGED))
    return tuple(found)[:cap]
