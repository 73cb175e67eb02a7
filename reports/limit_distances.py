"""Compute how far each check stays from its limits, for a small chart."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from reports.matrix_rows import CHECK_KINDS, group_rows
from reports.measures import rank_dtype
from reports.metrics import Metric, count_verdicts, find_worst_metric, rank_share
from reports.record_groups import Contender, RecordGroups, group_by
from reports.records import Record

MAX_CONTENDERS_BY_CHECK = 3
"""Up to so many contenders have a chart each, by check. More share one chart, with a row each."""
MAX_ROWS = 40


@dataclasses.dataclass(frozen=True)
class DistanceRow:
    """One row of a chart: a check of a contender, or a whole contender.

    Attributes:
      name: the check, or the label of the contender.
      by_dtype: for each dtype, the judged figure closest to its limit or furthest beyond it.
      red_without_figure: how many of them have no figure, such as calls that raised.
    """

    name: str
    by_dtype: Mapping[str, Metric]
    red: int
    red_without_figure: int

    @property
    def worst(self) -> Metric | None:
        """The figure of all dtypes closest to its limit or furthest beyond it; none if no record has one."""
        return max(self.by_dtype.values(), key=lambda metric: rank_share(metric.share), default=None)


@dataclasses.dataclass(frozen=True)
class DistanceChart:
    """Rows of figures as multiples of their limits.

    Attributes:
      title: the contender, or what the rows are.
      noun: what a row is, `check` or `implementation`.
      dtypes: those that occur, in reading order.
      rows: in reading order; `hidden` more rows are left out.
      without_figure: the names of rows that passed without a figure, such as checks that errors are raised.
    """

    title: str
    noun: str
    dtypes: tuple[str, ...]
    rows: tuple[DistanceRow, ...]
    hidden: int
    without_figure: tuple[str, ...]


def build_distance_charts(groups: RecordGroups) -> tuple[DistanceChart, ...]:
    """Build a chart by check for each contender, or one of many; expected failures only if nothing else was judged."""
    contenders = tuple(groups.by_contender)
    if len(contenders) > MAX_CONTENDERS_BY_CHECK:
        records = {contender.label: found for contender, found in groups.by_contender.items()}
        charts = [_build_chart("All implementations", "implementation", records)]
    else:
        charts = [_build_chart(one.label, "check", _order_checks(groups, one)) for one in contenders]
    return tuple(chart for chart in charts if chart.rows)


def _order_checks(groups: RecordGroups, contender: Contender) -> dict[str, Sequence[Record]]:
    """Return the records of each check of a contender, checks in the order of the matrix."""
    found = {check: records for (one, check), records in groups.by_check.items() if one == contender}
    return {check: found[check] for _, checks in group_rows(found, CHECK_KINDS) for check in checks}


def _build_chart(title: str, noun: str, groups: Mapping[str, Sequence[Record]]) -> DistanceChart:
    rows = [_build_row(name, records) for name, records in groups.items()]
    shown = [row for row in rows if row.by_dtype or row.red]
    # Rows without a figure and without a red record passed, or were not judged; only those that passed are named.
    quiet = tuple(row.name for row in rows if not (row.by_dtype or row.red) and count_verdicts(groups[row.name]).judged)
    dtypes = tuple(sorted({dtype for row in shown for dtype in row.by_dtype}, key=rank_dtype))
    return DistanceChart(title, noun, dtypes, tuple(shown[:MAX_ROWS]), max(0, len(shown) - MAX_ROWS), quiet)


def _build_row(name: str, records: Sequence[Record]) -> DistanceRow:
    worst = {dtype: find_worst_metric(found) for dtype, found in group_by(records, lambda one: one.dtype).items()}
    by_dtype = {dtype: metric for dtype, metric in worst.items() if metric is not None and metric.share is not None}
    red = count_verdicts(records).red
    without = count_verdicts(record for record in records if record.ratio is None and record.rms is None).red
    return DistanceRow(name, by_dtype, red, without)
