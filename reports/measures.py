"""Compute the numeric tables of the HTML page from grouped records.

The tables show the spread of error ratios, the gradients, the margins by which cases discriminate, and the cost.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from cases.operand_registry import GRADIENTS, OBSERVABLES
from reports.metrics import compute_share, rank_record, rank_share
from reports.record_groups import JudgedImplementation, RecordGroups
from reports.records import JUDGED, Record

DTYPES = ("f32", "bf16", "f16")
MARGIN_EDGES = (1.0, 10.0, 100.0, 1e4)
"""The borders of the buckets in which margins are counted.

The margin of a case is the smallest ratio that simple wrong results (such as zeros) have in it, over the limit. Below 1
such a result would pass. The other borders separate close calls from obvious ones.
"""
_MAX_GRADIENT_ROWS = 200
_QUANTILES = (0.05, 0.5, 0.95, 0.99)


@dataclasses.dataclass(frozen=True)
class Spread:
    """Order statistics of error figures as shares of their limits. None is interpolated, so shares may be infinite."""

    least: float
    p05: float
    median: float
    p95: float
    p99: float
    most: float

    @property
    def is_over(self) -> bool:
        """Whether the largest share is beyond the limit."""
        return rank_share(self.most) > 1


@dataclasses.dataclass(frozen=True)
class Distribution:
    """The judged error figures of one observable (such as `out`) in one dtype.

    Attributes:
      dtype, observable: those of the records.
      count: how many records were judged by their largest ratio.
      over: how many of these records are beyond a limit.
      limits, rms_limits: the distinct limits of the records.
      spread: the spread of the records' largest ratios as shares of their limits.
      max_ratio: the largest ratio.
      max_ratio_flash: the largest ratio against the backward pass from the saved `out` and `logsumexp`.
      max_rms: the largest root mean square of ratios.
      max_rms_share: the largest root mean square as a share of its limit.
    """

    dtype: str
    observable: str
    count: int
    over: int
    limits: tuple[float, ...]
    rms_limits: tuple[float, ...]
    spread: Spread
    max_ratio: float
    max_rms: float | None
    max_rms_share: float | None
    max_ratio_flash: float | None


@dataclasses.dataclass(frozen=True)
class GradientCell:
    """The largest errors of one gradient of one implementation in one dtype.

    `ratio` is judged. `ratio_flash` is not: it is the error against the backward pass that is recomputed from the
    implementation's own saved `out` and `logsumexp`.
    """

    count: int
    over: int
    limits: tuple[float, ...]
    ratio: float
    ratio_flash: float | None


@dataclasses.dataclass(frozen=True)
class GradientTable:
    """The errors of gradients: by implementation and observable (rows), and dtype (columns); without `hidden` rows."""

    rows: tuple[tuple[JudgedImplementation, str], ...]
    dtypes: tuple[str, ...]
    cells: Mapping[tuple[JudgedImplementation, str, str], GradientCell]
    hidden: int


@dataclasses.dataclass(frozen=True)
class MarginRow:
    """The margins by which the cases of one implementation discriminate between right and simple wrong results.

    `buckets` has the number of cases between successive `MARGIN_EDGES`.
    """

    implementation: JudgedImplementation
    cases: int
    least: float
    median: float
    buckets: tuple[int, ...]
    weakest_case: str


@dataclasses.dataclass(frozen=True)
class CostTable:
    """Seconds spent on judging, by check (rows, the most expensive first) and implementation (columns)."""

    implementations: tuple[JudgedImplementation, ...]
    checks: tuple[str, ...]
    seconds: Mapping[tuple[JudgedImplementation, str], float]

    @property
    def total(self) -> float:
        """Seconds spent on all records."""
        return math.fsum(self.seconds.values())

    def sum_check(self, check: str) -> float:
        """Return the seconds of one check over all implementations."""
        return math.fsum(self.seconds.get((implementation, check), 0.0) for implementation in self.implementations)

    def sum_implementation(self, implementation: JudgedImplementation) -> float:
        """Return the seconds of one implementation over all checks."""
        return math.fsum(self.seconds.get((implementation, check), 0.0) for check in self.checks)


@dataclasses.dataclass(frozen=True)
class Measures:
    """The numeric tables of the HTML page."""

    distributions: tuple[Distribution, ...]
    gradients: GradientTable
    margins: tuple[MarginRow, ...]
    cost: CostTable


def build_measures(groups: RecordGroups) -> Measures:
    """Compute the numeric tables of the HTML page from grouped records."""
    return Measures(
        distributions=tuple(_build_distributions(groups)),
        gradients=_build_gradient_table(groups),
        margins=tuple(_build_margins(groups)),
        cost=_build_cost_table(groups),
    )


def find_quantile(ordered: Sequence[float], fraction: float) -> float:
    """Return the smallest value with at least `fraction` of all values at or below it (nearest rank)."""
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def compute_spread(values: Iterable[float]) -> Spread:
    """Compute order statistics of at least one value; NaN sorts as the largest."""
    ordered = sorted(values, key=lambda value: (math.isnan(value), rank_share(value)))
    p05, median, p95, p99 = (find_quantile(ordered, fraction) for fraction in _QUANTILES)
    return Spread(ordered[0], p05, median, p95, p99, ordered[-1])


def rank_dtype(dtype: str) -> tuple[int, str]:
    """Return a sort key of dtypes: the common ones from wide to narrow, then by name."""
    return (DTYPES.index(dtype) if dtype in DTYPES else len(DTYPES), dtype)


def rank_observable(observable: str) -> tuple[int, str]:
    """Return a sort key of observables: in the order of the contract, then by name."""
    return (OBSERVABLES.index(observable) if observable in OBSERVABLES else len(OBSERVABLES), observable)


def _build_distributions(groups: RecordGroups) -> Iterator[Distribution]:
    """Yield a distribution for each dtype and observable with a judged ratio, in reading order."""
    order = sorted(groups.by_dtype, key=lambda key: (rank_dtype(key[0]), rank_observable(key[1])))
    for dtype, observable in order:
        judged = [
            record
            for record in groups.by_dtype[dtype, observable]
            if record.verdict in JUDGED and record.ratio is not None and record.limit is not None
        ]
        if judged:
            yield _build_distribution(dtype, observable, judged)


def _build_distribution(dtype: str, observable: str, records: Sequence[Record]) -> Distribution:
    shares = [compute_share(r.ratio or 0.0, r.limit) or 0.0 for r in records]
    return Distribution(
        dtype,
        observable,
        count=len(records),
        over=sum(rank_record(record) > 1 for record in records),
        limits=_sort_distinct(r.limit for r in records),
        rms_limits=_sort_distinct(r.rms_limit for r in records),
        spread=compute_spread(shares),
        max_ratio=_find_largest(r.ratio for r in records) or 0.0,
        max_rms=_find_largest(r.rms for r in records),
        max_rms_share=_find_largest(compute_share(r.rms, r.rms_limit) for r in records if r.rms is not None),
        max_ratio_flash=_find_largest(r.ratio_flash for r in records),
    )


def _build_gradient_table(groups: RecordGroups) -> GradientTable:
    """Build the table of gradient ratios against the exact and the recomputed (flash) backward pass."""
    cells = {}
    for (implementation, observable, dtype), records in groups.by_gradient.items():
        judged = [
            record
            for record in records
            if record.verdict in JUDGED
            and record.ratio is not None
            and (record.observable in GRADIENTS or record.ratio_flash is not None)
        ]
        if judged:
            cells[implementation, observable, dtype] = _build_gradient_cell(judged)
    rows = sorted({key[:2] for key in cells}, key=lambda row: (row[0], rank_observable(row[1])))
    dtypes = tuple(sorted({key[2] for key in cells}, key=rank_dtype))
    return GradientTable(tuple(rows[:_MAX_GRADIENT_ROWS]), dtypes, cells, max(0, len(rows) - _MAX_GRADIENT_ROWS))


def _build_gradient_cell(records: Sequence[Record]) -> GradientCell:
    return GradientCell(
        count=len(records),
        over=sum(rank_share(compute_share(r.ratio or 0.0, r.limit)) > 1 for r in records),
        limits=_sort_distinct(r.limit for r in records),
        ratio=_find_largest(r.ratio for r in records) or 0.0,
        ratio_flash=_find_largest(r.ratio_flash for r in records),
    )


def _build_margins(groups: RecordGroups) -> Iterator[MarginRow]:
    """Yield the margins of each implementation's cases. A case counts once, by its smallest margin."""
    for implementation, records in groups.by_implementation.items():
        smallest: dict[str, float] = {}
        for record in records:
            if record.margin is not None:
                # A margin of NaN proves nothing, so it counts as a margin of 0.
                margin = 0.0 if math.isnan(record.margin) else record.margin
                smallest[record.case] = min(margin, smallest.get(record.case, math.inf))
        if smallest:
            yield _build_margin_row(implementation, smallest)


def _build_margin_row(implementation: JudgedImplementation, smallest: Mapping[str, float]) -> MarginRow:
    ordered = sorted(smallest.values())
    edges = (-math.inf, *MARGIN_EDGES, math.inf)
    buckets = tuple(
        sum(low <= value < high or value == high == math.inf for value in ordered)
        for low, high in itertools.pairwise(edges)
    )
    weakest = min(smallest, key=lambda case: (smallest[case], case))
    return MarginRow(implementation, len(ordered), ordered[0], find_quantile(ordered, 0.5), buckets, weakest)


def _build_cost_table(groups: RecordGroups) -> CostTable:
    seconds = {key: math.fsum(record.seconds for record in records) for key, records in groups.by_check.items()}
    totals: dict[str, float] = {}
    for implementation, check in sorted(seconds):
        totals[check] = totals.get(check, 0.0) + seconds[implementation, check]
    checks = sorted(totals, key=lambda check: (-totals[check], check))
    return CostTable(tuple(groups.by_implementation), tuple(checks), seconds)


def _find_largest(values: Iterable[float | None]) -> float | None:
    """Return the largest value that is not None; NaN counts as the largest."""
    present = [value for value in values if value is not None]
    return max(present, key=lambda value: (math.isnan(value), rank_share(value)), default=None)


def _sort_distinct(values: Iterable[float | None]) -> tuple[float, ...]:
    return tuple(sorted({value for value in values if value is not None}))
