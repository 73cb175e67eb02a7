"""Build the two matrices of the HTML page: contenders by features, and contenders by checks.

Each cell has the counts of its records, its worst error figure, and the records to show first.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence

from conformance.records import EXPECTED_FAIL, PASS, RED, UNJUDGED, UNSUPPORTED, Record
from reports.matrix_columns import CHECK_KINDS, FEATURE_KINDS, group_columns
from reports.metrics import Counts, Metric, count_verdicts, find_worst_metric, rank_record, rank_share
from reports.record_groups import NO_FEATURE, Contender, RecordGroups

SHOWN_PER_CELL = 3
"""The most records of a cell that the page shows if its script does not run."""
_MAX_REASONS = 3
_WORST_FIRST = ("fail", "expected", "pass", "unjudged", "unsupported", "absent")


@dataclasses.dataclass(frozen=True)
class MatrixCell:
    """A cell of a matrix: the records of one contender for one feature or one check.

    Attributes:
      counts: the number of records by verdict.
      worst: the judged error figure that is closest to its limit, or furthest beyond it.
      reasons: the reasons why some of the records were not judged.
      shown: the records that the page shows if its script does not run, red ones first.
      anchor: the HTML anchor of the shown records.
    """

    counts: Counts
    worst: Metric | None
    reasons: tuple[str, ...]
    shown: tuple[Record, ...]
    anchor: str

    @property
    def state(self) -> str:
        """The name of the cell's colour: fail, expected, pass, unjudged, unsupported or absent."""
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
    def rank(self) -> tuple[int, float, int]:
        """The sort key of the cell within its column, the worst first.

        The key has the state, the largest error figure as a share of its limit, and the number of red records. A red
        cell without an error figure ranks worst, for example one in which every call raised.
        """
        share = rank_share(self.worst.share) if self.worst is not None else math.inf if self.counts.red else -math.inf
        return _WORST_FIRST.index(self.state), -share, -self.counts.red


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A matrix of contenders (rows) by features or by checks (columns).

    Attributes:
      kind: `feature` or `check`.
      contenders: the rows.
      groups: pairs of a kind of column, such as `mask`, and the columns of that kind.
      cells: the cells by contender and column; there is no cell where there are no records.
      ranks: the place of a cell in its column, the worst first; equal cells share a place.
    """

    kind: str
    contenders: tuple[Contender, ...]
    groups: tuple[tuple[str, tuple[str, ...]], ...]
    cells: Mapping[tuple[Contender, str], MatrixCell]
    ranks: Mapping[tuple[Contender, str], int]

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all columns, in order."""
        return tuple(column for _, columns in self.groups for column in columns)


def build_matrices(groups: RecordGroups) -> tuple[Matrix, Matrix]:
    """Build the matrix of contenders by features, and the matrix of contenders by checks.

    A record counts in the column of each of its features.
    """
    features = group_columns(_list_columns(groups.by_feature), FEATURE_KINDS)
    checks = group_columns(_list_columns(groups.by_check), CHECK_KINDS)
    contenders = tuple(groups.by_contender)
    return (
        _build_matrix("feature", contenders, features, groups.by_feature),
        _build_matrix("check", contenders, checks, groups.by_check),
    )


def rank_for_table(record: Record) -> tuple[int, float, tuple[str, ...]]:
    """Return the sort key of a record in the page's table of records.

    Red records come first, then other records that did not pass, then passes. Within each of these groups, the records
    closest to their limits come first.
    """
    others = {EXPECTED_FAIL: 1, UNJUDGED: 2, PASS: 4}
    return 0 if record.verdict in RED else others.get(record.verdict, 3), -rank_record(record), record.key


def _list_columns(groups: Iterable[tuple[Contender, str]]) -> tuple[str, ...]:
    """List the columns in the order of first appearance, `NO_FEATURE` last."""
    columns = dict.fromkeys(column for _, column in groups)
    return tuple(sorted(columns, key=lambda column: column == NO_FEATURE))


def _build_matrix(
    kind: str,
    contenders: tuple[Contender, ...],
    columns: Sequence[tuple[str, tuple[str, ...]]],
    groups: Mapping[tuple[Contender, str], Sequence[Record]],
) -> Matrix:
    names = [column for _, found in columns for column in found]
    places = {contender: place for place, contender in enumerate(contenders)}
    numbers = {column: number for number, column in enumerate(names)}
    cells = {
        (contender, column): MatrixCell(
            count_verdicts(records),
            find_worst_metric(records),
            _list_reasons(records),
            tuple(heapq.nsmallest(SHOWN_PER_CELL, records, key=rank_for_table)),
            f"records-{places[contender]}-{kind}-{numbers[column]}",
        )
        for (contender, column), records in groups.items()
    }
    return Matrix(kind, contenders, tuple(columns), cells, _rank_cells(cells))


def _rank_cells(cells: Mapping[tuple[Contender, str], MatrixCell]) -> dict[tuple[Contender, str], int]:
    columns: dict[str, set[tuple[int, float, int]]] = {}
    for (_, column), cell in cells.items():
        columns.setdefault(column, set()).add(cell.rank)
    places = {column: {each: place for place, each in enumerate(sorted(ranks))} for column, ranks in columns.items()}
    return {(contender, column): places[column][cell.rank] for (contender, column), cell in cells.items()}


def _list_reasons(records: Iterable[Record]) -> tuple[str, ...]:
    found = dict.fromkeys(r.reason for r in records if r.reason and r.verdict in (UNSUPPORTED, UNJUDGED))
    return tuple(found)[:_MAX_REASONS]
