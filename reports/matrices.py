"""Build matrices of features and of checks by contenders, and the records behind each cell."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence

from conformance.records import EXPECTED_FAIL, PASS, RED, UNJUDGED, UNSUPPORTED, Record
from reports.matrix_rows import CHECK_KINDS, FEATURE_KINDS, group_rows
from reports.metrics import Counts, Metric, count_verdicts, find_worst_metric, rank_record, rank_share
from reports.record_groups import NO_FEATURE, Contender, RecordGroups

SHOWN_PER_CELL = 3
"""Records of each cell that are on the page without its script."""
_MAX_REASONS = 3
_WORST_FIRST = ("fail", "expected", "pass", "unjudged", "unsupported", "absent")


@dataclasses.dataclass(frozen=True)
class MatrixCell:
    """What one contender did in one row of a matrix: with one feature, or in one check.

    Attributes:
      counts: its records by verdict.
      worst: the judged figure closest to its limit or furthest beyond it.
      reasons: why some of them have no judgement.
      shown: the records that are on the page without its script, red ones first.
      anchor: the address of these records on the page.
    """

    counts: Counts
    worst: Metric | None
    reasons: tuple[str, ...]
    shown: tuple[Record, ...]
    anchor: str

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
    def rank(self) -> tuple[int, float, int]:
        """The sort key of the cells of a contender, the worst first.

        It has the state, the largest share of a limit, and the number of red records.

        A red cell without a figure, such as one where each call raised, ranks worse than any figure.
        """
        share = rank_share(self.worst.share) if self.worst is not None else math.inf if self.counts.red else -math.inf
        return _WORST_FIRST.index(self.state), -share, -self.counts.red


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Features or checks (rows) by contenders (columns). A pair without records has no cell.

    Attributes:
      kind: what a row is, `feature` or `check`.
      contenders: the columns.
      groups: the rows of each kind.
      cells: by contender and row.
      ranks: the place of a cell among those of its contender, the worst first. Equal cells share a place.
    """

    kind: str
    contenders: tuple[Contender, ...]
    groups: tuple[tuple[str, tuple[str, ...]], ...]
    cells: Mapping[tuple[Contender, str], MatrixCell]
    ranks: Mapping[tuple[Contender, str], int]

    @property
    def rows(self) -> tuple[str, ...]:
        """All rows, in order."""
        return tuple(row for _, rows in self.groups for row in rows)


def build_matrices(groups: RecordGroups) -> tuple[Matrix, Matrix]:
    """Build the matrix of features, and that of checks.

    A record counts in the row of each of its features.
    """
    features = group_rows(_list_rows(groups.by_feature), FEATURE_KINDS)
    checks = group_rows(_list_rows(groups.by_check), CHECK_KINDS)
    contenders = tuple(groups.by_contender)
    return (
        _build_matrix("feature", contenders, features, groups.by_feature),
        _build_matrix("check", contenders, checks, groups.by_check),
    )


def rank_for_table(record: Record) -> tuple[int, float, tuple[str, ...]]:
    """Return a sort key of records, those that did not pass first.

    Red records come first, then what else did not pass, then passes, the closest to their limits first.
    """
    others = {EXPECTED_FAIL: 1, UNJUDGED: 2, PASS: 4}
    return 0 if record.verdict in RED else others.get(record.verdict, 3), -rank_record(record), record.key


def _list_rows(groups: Iterable[tuple[Contender, str]]) -> tuple[str, ...]:
    """List the rows in the order of first appearance, `NO_FEATURE` last."""
    rows = dict.fromkeys(row for _, row in groups)
    return tuple(sorted(rows, key=lambda row: row == NO_FEATURE))


def _build_matrix(
    kind: str,
    contenders: tuple[Contender, ...],
    rows: Sequence[tuple[str, tuple[str, ...]]],
    groups: Mapping[tuple[Contender, str], Sequence[Record]],
) -> Matrix:
    names = [row for _, found in rows for row in found]
    places = {contender: place for place, contender in enumerate(contenders)}
    numbers = {row: number for number, row in enumerate(names)}
    cells = {
        (contender, row): MatrixCell(
            count_verdicts(records),
            find_worst_metric(records),
            _list_reasons(records),
            tuple(heapq.nsmallest(SHOWN_PER_CELL, records, key=rank_for_table)),
            f"records-{places[contender]}-{kind}-{numbers[row]}",
        )
        for (contender, row), records in groups.items()
    }
    return Matrix(kind, contenders, tuple(rows), cells, _rank_cells(cells))


def _rank_cells(cells: Mapping[tuple[Contender, str], MatrixCell]) -> dict[tuple[Contender, str], int]:
    ranks: dict[Contender, set[tuple[int, float, int]]] = {}
    for (contender, _), cell in cells.items():
        ranks.setdefault(contender, set()).add(cell.rank)
    places = {one: {each: place for place, each in enumerate(sorted(found))} for one, found in ranks.items()}
    return {(contender, row): places[contender][cell.rank] for (contender, row), cell in cells.items()}


def _list_reasons(records: Iterable[Record]) -> tuple[str, ...]:
    found = dict.fromkeys(r.reason for r in records if r.reason and r.verdict in (UNSUPPORTED, UNJUDGED))
    return tuple(found)[:_MAX_REASONS]
