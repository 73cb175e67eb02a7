"""Matrices: contenders by features and by checks, and what each cell says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from conformance.records import EXPECTED_FAIL, PASS, UNJUDGED, UNSUPPORTED, Record
from reports.conformity import (
    Contender,
    Counts,
    Metric,
    count_verdicts,
    find_worst_metric,
    get_contender,
    group_by_contender,
    rank_share,
)
from reports.matrix_columns import CHECK_KINDS, FEATURE_KINDS, group_columns

NO_FEATURE = "(none named)"
"""The matrix column of records that name no feature, so that no record is missing from the matrix."""
_WORST_FIRST = ("fail", "expected", "pass", "unjudged", "unsupported", "absent")


@dataclasses.dataclass(frozen=True)
class MatrixCell:
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

    @property
    def goodness(self) -> tuple[int, float, int]:
        """What the cells of a column are sorted by, the worst first: state, largest share of a limit, how many are red.

        What is red without a figure, as where each call raised, is further off than any figure.
        """
        share = rank_share(self.worst.share) if self.worst is not None else math.inf if self.counts.red else -math.inf
        return _WORST_FIRST.index(self.state), -share, -self.counts.red


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Contenders by columns, which stand in groups of a kind; a pair without records has no cell.

    `ranks` are the places of the cells of a column from the worst on; cells that say the same share theirs.
    """

    contenders: tuple[Contender, ...]
    groups: tuple[tuple[str, tuple[str, ...]], ...]
    cells: Mapping[tuple[Contender, str], MatrixCell]
    ranks: Mapping[tuple[Contender, str], int]

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns, in order."""
        return tuple(column for _, columns in self.groups for column in columns)


def list_features(records: Iterable[Record]) -> tuple[str, ...]:
    """Features in the order of first appearance, and `NO_FEATURE` last where a record names none."""
    seen: dict[str, None] = {}
    unnamed = False
    for record in records:
        seen.update(dict.fromkeys(record.features))
        unnamed = unnamed or not record.features
    return (*seen, NO_FEATURE) if unnamed else tuple(seen)


def build_feature_matrix(records: Sequence[Record]) -> Matrix:
    """Contenders by features; a record counts once in the column of each of its features."""
    groups = group_columns(list_features(records), FEATURE_KINDS)
    return _build_matrix(records, groups, lambda record: set(record.features) or {NO_FEATURE})


def build_check_matrix(records: Sequence[Record]) -> Matrix:
    """Contenders by checks."""
    groups = group_columns((record.check for record in records), CHECK_KINDS)
    return _build_matrix(records, groups, lambda record: {record.check})


def _build_matrix(
    records: Sequence[Record],
    kinds: Iterable[tuple[str, tuple[str, ...]]],
    place: Callable[[Record], Iterable[str]],
) -> Matrix:
    groups: dict[tuple[Contender, str], list[Record]] = {}
    for record in records:
        for column in place(record):
            groups.setdefault((get_contender(record), column), []).append(record)
    cells = {
        key: MatrixCell(count_verdicts(group), find_worst_metric(group), _list_reasons(group))
        for key, group in groups.items()
    }
    return Matrix(tuple(group_by_contender(records)), tuple(kinds), cells, _rank_cells(cells))


def _rank_cells(cells: Mapping[tuple[Contender, str], MatrixCell]) -> dict[tuple[Contender, str], int]:
    columns: dict[str, set[tuple[int, float, int]]] = {}
    for (_, column), cell in cells.items():
        columns.setdefault(column, set()).add(cell.goodness)
    places = {column: {each: place for place, each in enumerate(sorted(every))} for column, every in columns.items()}
    return {(contender, column): places[column][cell.goodness] for (contender, column), cell in cells.items()}


def _list_reasons(records: Iterable[Record], *, cap: int = 3) -> tuple[str, ...]:
    found = dict.fromkeys(r.reason for r in records if r.reason and r.verdict in (UNSUPPORTED, UNJUDGED))
    return tuple(found)[:cap]
