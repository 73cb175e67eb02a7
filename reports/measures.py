"""What the figures in the records show: spread of ratios, gradients by both backward passes, margins and cost."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from cases.operand_registry import GRADIENTS, OBSERVABLES
from conformance.records import JUDGED, Record
from reports.conformity import Contender, Metric, find_decisive_metric, get_contender, group_by_contender, rank_share

DTYPES = ("f32", "bf16", "f16")
MARGIN_EDGES = (1.0, 10.0, 100.0, 1e4)
"""Below 1 a null result would pass; the rest are decades that tell a close call from an obvious one."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """Order statistics of shares (value over limit). Nothing is interpolated, so shares may be infinite."""

    least: float
    p05: float
    median: float
    p95: float
    p99: float
    most: float


@dataclasses.dataclass(frozen=True)
class Distribution:
    """The judged figures of one observable in one dtype."""

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
    """One gradient of one contender in one dtype: the judged ratio and the same figure against the flash backward."""

    count: int
    over: int
    limits: tuple[float, ...]
    ratio: float
    ratio_flash: float | None


@dataclasses.dataclass(frozen=True)
class GradientTable:
    """Gradients by contender and observable (rows) and dtype (columns)."""

    rows: tuple[tuple[Contender, str], ...]
    dtypes: tuple[str, ...]
    cells: Mapping[tuple[Contender, str, str], GradientCell]
    hidden: int


@dataclasses.dataclass(frozen=True)
class MarginRow:
    """How well the cases of one contender discriminate; `buckets` counts cases between the `MARGIN_EDGES`."""

    contender: Contender
    cases: int
    least: float
    median: float
    buckets: tuple[int, ...]
    weakest_case: str


@dataclasses.dataclass(frozen=True)
class CostTable:
    """Seconds by check (rows) and contender (columns)."""

    contenders: tuple[Contender, ...]
    checks: tuple[str, ...]
    seconds: Mapping[tuple[str, Contender], float]

    @property
    def total(self) -> float:
        """Seconds of all records."""
        return math.fsum(self.seconds.values())

    def row(self, check: str) -> float:
        """Seconds of one check over all contenders."""
        return math.fsum(self.seconds.get((check, contender), 0.0) for contender in self.contenders)

    def column(self, contender: Contender) -> float:
        """Seconds of one contender over all checks."""
        return math.fsum(self.seconds.get((check, contender), 0.0) for check in self.checks)


def find_quantile(ordered: Sequence[float], fraction: float) -> float:
    """The smallest value with at least `fraction` of all values at or below it (nearest rank, never interpolated)."""
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def compute_spread(values: Iterable[float]) -> Spread:
    """Order statistics of at least one value; NaN sorts as the largest."""
    ordered = sorted(values, key=lambda value: (math.isnan(value), rank_share(value)))
    p05, median, p95, p99 = (find_quantile(ordered, fraction) for fraction in (0.05, 0.5, 0.95, 0.99))
    return Spread(ordered[0], p05, median, p95, p99, ordered[-1])


def build_distributions(records: Iterable[Record]) -> list[Distribution]:
    """One distribution for each dtype and observable with a judged ratio, in reading order."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.verdict in JUDGED and record.ratio is not None and record.limit is not None:
            groups.setdefault((record.dtype, record.observable), []).append(record)
    order = sorted(groups, key=lambda key: (rank_dtype(key[0]), rank_observable(key[1])))
    return [_build_distribution(dtype, observable, groups[dtype, observable]) for dtype, observable in order]


def build_gradient_table(records: Iterable[Record], *, cap: int = 200) -> GradientTable:
    """Gradients by contender, observable and dtype, with the ratio against each of the two backwards."""
    groups: dict[tuple[Contender, str, str], list[Record]] = {}
    for record in records:
        is_gradient = record.observable in GRADIENTS or record.ratio_flash is not None
        if record.verdict in JUDGED and record.ratio is not None and is_gradient:
            groups.setdefault((get_contender(record), record.observable, record.dtype), []).append(record)
    rows = sorted({key[:2] for key in groups}, key=lambda row: (row[0], rank_observable(row[1])))
    dtypes = tuple(sorted({key[2] for key in groups}, key=rank_dtype))
    cells = {key: _build_gradient_cell(group) for key, group in groups.items()}
    return GradientTable(tuple(rows[:cap]), dtypes, cells, max(0, len(rows) - cap))


def build_margins(records: Iterable[Record]) -> list[MarginRow]:
    """Discrimination by contender; a case counts once, by the smallest margin among its records."""
    rows = []
    for contender, group in group_by_contender(records).items():
        smallest: dict[str, float] = {}
        for record in group:
            if record.margin is not None:
                # A margin of NaN proves nothing, so it counts as none at all.
                margin = 0.0 if math.isnan(record.margin) else record.margin
                smallest[record.case] = min(margin, smallest.get(record.case, math.inf))
        if smallest:
            rows.append(_build_margin_row(contender, smallest))
    return rows


def build_cost_table(records: Iterable[Record]) -> CostTable:
    """Seconds by check and contender, the most expensive check first."""
    seconds: dict[tuple[str, Contender], list[float]] = {}
    for record in records:
        seconds.setdefault((record.check, get_contender(record)), []).append(record.seconds)
    table = {key: math.fsum(values) for key, values in seconds.items()}
    contenders = tuple(sorted({contender for _, contender in table}))
    totals: dict[str, float] = {}
    for (check, _), value in sorted(table.items()):
        totals[check] = totals.get(check, 0.0) + value
    return CostTable(contenders, tuple(sorted(totals, key=lambda check: (-totals[check], check))), table)


def rank_dtype(dtype: str) -> tuple[int, str]:
    """A sort key: the common dtypes from wide to narrow, then by name."""
    return (DTYPES.index(dtype) if dtype in DTYPES else len(DTYPES), dtype)


def rank_observable(observable: str) -> tuple[int, str]:
    """A sort key: the order in which a reader expects them, which is the contract's, then by name."""
    return (OBSERVABLES.index(observable) if observable in OBSERVABLES else len(OBSERVABLES), observable)


def _build_distribution(dtype: str, observable: str, records: Sequence[Record]) -> Distribution:
    shares = [Metric("max", r.ratio or 0.0, r.limit).share or 0.0 for r in records]
    rms = [Metric("rms", r.rms, r.rms_limit) for r in records if r.rms is not None and r.rms_limit is not None]
    return Distribution(
        dtype,
        observable,
        count=len(records),
        over=sum(_is_over(record) for record in records),
        limits=_sort_distinct(r.limit for r in records),
        rms_limits=_sort_distinct(r.rms_limit for r in records),
        spread=compute_spread(shares),
        max_ratio=_find_largest(r.ratio for r in records) or 0.0,
        max_rms=_find_largest(r.rms for r in records),
        max_rms_share=_find_largest(metric.share for metric in rms),
        max_ratio_flash=_find_largest(r.ratio_flash for r in records),
    )


def _build_gradient_cell(records: Sequence[Record]) -> GradientCell:
    return GradientCell(
        count=len(records),
        over=sum(rank_share(Metric("max", r.ratio or 0.0, r.limit).share) > 1 for r in records),
        limits=_sort_distinct(r.limit for r in records),
        ratio=_find_largest(r.ratio for r in records) or 0.0,
        ratio_flash=_find_largest(r.ratio_flash for r in records),
    )


def _is_over(record: Record) -> bool:
    metric = find_decisive_metric(record)
    return metric is not None and rank_share(metric.share) > 1


def _build_margin_row(contender: Contender, smallest: Mapping[str, float]) -> MarginRow:
    ordered = sorted(smallest.values())
    edges = (-math.inf, *MARGIN_EDGES, math.inf)
    buckets = tuple(
        sum(low <= value < high or value == high == math.inf for value in ordered)
        for low, high in itertools.pairwise(edges)
    )
    weakest = min(smallest, key=lambda case: (smallest[case], case))
    return MarginRow(contender, len(ordered), ordered[0], find_quantile(ordered, 0.5), buckets, weakest)


def _find_largest(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return max(present, key=lambda value: (math.isnan(value), rank_share(value)), default=None)


def _sort_distinct(values: Iterable[float | None]) -> tuple[float, ...]:
    return tuple(sorted({value for value in values if value is not None}))
