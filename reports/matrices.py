"""Build the two matrices of the HTML page: features by implementations, and checks by implementations.

Each cell has the counts of its records, its worst error figure, and the records to show first.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from reports.matrix_rows import CHECK_KINDS, FEATURE_KINDS, group_rows
from reports.metrics import Counts, Metric, count_verdicts, find_worst_metric, rank_record, rank_share
from reports.record_groups import NO_FEATURE, JudgedImplementation, RecordGroups, list_record_features
from reports.records import EXPECTED_FAIL, PASS, RED, UNJUDGED, UNSUPPORTED, Record

SHOWN_PER_CELL = 3
"""The most records of a cell that the page shows if its script does not run."""
_MAX_REASONS = 3
_TABLE_ORDER = {**dict.fromkeys(RED, 0), EXPECTED_FAIL: 1, UNJUDGED: 2, PASS: 4}
_WORST_FIRST = ("fail", "expected", "pass", "unjudged", "unsupported", "absent")


@dataclasses.dataclass(frozen=True)
class MatrixCell:
    """A cell of a matrix: the records of one implementation for one feature or one check.

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
        """The sort key of the cell among those of its implementation, the worst first.

        The key has the state, the largest error figure as a share of its limit, and the number of red records. A red
        cell without an error figure ranks worst, for example one in which every call raised.
        """
        share = rank_share(self.worst.share) if self.worst is not None else math.inf if self.counts.red else -math.inf
        return _WORST_FIRST.index(self.state), -share, -self.counts.red


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A matrix of features or of checks (rows) by implementations (columns).

    Attributes:
      kind: `feature` or `check`.
      implementations: the columns.
      groups: pairs of a kind of row, such as `mask`, and the rows of that kind.
      cells: the cells by implementation and row; there is no cell where there are no records.
      ranks: the place of a cell among those of its implementation, the worst first; equal cells share a place.
    """

    kind: str
    implementations: tuple[JudgedImplementation, ...]
    groups: tuple[tuple[str, tuple[str, ...]], ...]
    cells: Mapping[tuple[JudgedImplementation, str], MatrixCell]
    ranks: Mapping[tuple[JudgedImplementation, str], int]

    @property
    def rows(self) -> tuple[str, ...]:
        """The names of all rows, in order."""
        return tuple(row for _, rows in self.groups for row in rows)


def build_matrices(groups: RecordGroups) -> tuple[Matrix, Matrix]:
    """Build the matrix of features by implementations, and the matrix of checks by implementations.

    A record counts in the row of each of its features.
    """
    ranked = {one: sorted(records, key=rank_for_table) for one, records in groups.by_implementation.items()}
    features = _list_rows(itertools.chain.from_iterable(map(list_record_features, groups.records)))
    checks = _list_rows(record.check for record in groups.records)
    return (
        _build_matrix("feature", ranked, group_rows(features, FEATURE_KINDS), list_record_features),
        _build_matrix("check", ranked, group_rows(checks, CHECK_KINDS), lambda record: (record.check,)),
    )


def rank_for_table(record: Record) -> tuple[int, float, tuple[str, ...]]:
    """Return the sort key of a record in the page's table of records.

    Red records come first, then other records that did not pass, then passes. Within each of these groups, the records
    closest to their limits come first.
    """
    return _TABLE_ORDER.get(record.verdict, 3), -rank_record(record), record.key


def _list_rows(names: Iterable[str]) -> tuple[str, ...]:
    """List the rows in the order of first appearance, `NO_FEATURE` last."""
    return tuple(sorted(dict.fromkeys(names), key=lambda row: row == NO_FEATURE))


def _build_matrix(
    kind: str,
    ranked: Mapping[JudgedImplementation, Sequence[Record]],
    rows: Sequence[tuple[str, tuple[str, ...]]],
    list_rows: Callable[[Record], Iterable[str]],
) -> Matrix:
    """Build a matrix from the records of each implementation, in the order of the table (`rank_for_table`)."""
    numbers = {row: number for number, row in enumerate(row for _, found in rows for row in found)}
    cells = {}
    for place, (implementation, records) in enumerate(ranked.items()):
        by_row: dict[str, list[Record]] = {}
        for record in records:
            for row in list_rows(record):
                by_row.setdefault(row, []).append(record)
        for row, found in by_row.items():
            cells[implementation, row] = _build_cell(found, f"records-{place}-{kind}-{numbers[row]}")
    return Matrix(kind, tuple(ranked), tuple(rows), cells, _rank_cells(cells))


def _build_cell(ranked: Sequence[Record], anchor: str) -> MatrixCell:
    # The first record of each verdict is its worst. Equal ones are then told apart by their keys, as everywhere.
    worst = {record.verdict: record for record in reversed(ranked)}.values()
    return MatrixCell(
        count_verdicts(ranked),
        find_worst_metric(sorted(worst, key=lambda record: record.key)),
        _list_reasons(ranked),
        tuple(ranked[:SHOWN_PER_CELL]),
        anchor,
    )


def _rank_cells(
    cells: Mapping[tuple[JudgedImplementation, str], MatrixCell],
) -> dict[tuple[JudgedImplementation, str], int]:
    ranks: dict[JudgedImplementation, set[tuple[int, float, int]]] = {}
    for (implementation, _), cell in cells.items():
        ranks.setdefault(implementation, set()).add(cell.rank)
    places = {one: {each: place for place, each in enumerate(sorted(found))} for one, found in ranks.items()}
    return {(implementation, row): places[implementation][cell.rank] for (implementation, row), cell in cells.items()}


def _list_reasons(records: Iterable[Record]) -> tuple[str, ...]:
    without = sorted(
        (record for record in records if record.reason and record.verdict in (UNSUPPORTED, UNJUDGED)),
        key=lambda record: record.key,
    )
    return tuple(dict.fromkeys(record.reason for record in without))[:_MAX_REASONS]
