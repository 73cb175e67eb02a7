"""Error figures of records relative to their limits, counts of records by verdict, and sort keys for both.

An error figure is a record's largest ratio, or the root mean square (rms) of its ratios. A ratio is an element's error
in units of its bound. All reports use these figures.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping

from reports.records import ERROR, EXPECTED_FAIL, FAIL, JUDGED, RED, VERDICTS, Record


@dataclasses.dataclass(frozen=True)
class Metric:
    """An error figure that was judged, and its limit."""

    name: str  # `max` for the largest ratio, `rms` for the root mean square of the ratios
    value: float  # the error figure
    limit: float | None  # the largest value that passes; None if there is no limit

    @property
    def share(self) -> float | None:
        """The value divided by its limit, above 1 if it fails; None without a limit. A limit of 0 admits only 0."""
        return compute_share(self.value, self.limit)

    @property
    def is_over(self) -> bool:
        """Whether the value is beyond its limit, or NaN."""
        return rank_share(self.share) > 1


@dataclasses.dataclass(frozen=True)
class Counts:
    """The number of records with each verdict; verdicts that do not occur have 0."""

    by_verdict: Mapping[str, int]

    def __getitem__(self, verdict: str) -> int:
        """Return how many records have this verdict."""
        return self.by_verdict.get(verdict, 0)

    @property
    def total(self) -> int:
        """The number of records counted."""
        return sum(self.by_verdict.values())

    @property
    def red(self) -> int:
        """The number of records that make a run not conform."""
        return sum(self[verdict] for verdict in RED)

    @property
    def judged(self) -> int:
        """The number of records for which a result was compared."""
        return sum(self[verdict] for verdict in JUDGED)

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """Verdicts that occur, with their counts, in the order of `VERDICTS`."""
        return tuple((verdict, self[verdict]) for verdict in VERDICTS if self[verdict])


def count_verdicts(records: Iterable[Record]) -> Counts:
    """Count records by verdict."""
    counter = Counter(map(operator.attrgetter("verdict"), records))
    return Counts({verdict: counter[verdict] for verdict in VERDICTS})


def compute_share(value: float, limit: float | None) -> float | None:
    """Divide an error figure by its limit, as `Metric.share` does."""
    if limit is None:
        return None
    if limit == 0:
        return value if math.isnan(value) else (0.0 if value == 0 else math.inf)
    return value / limit


def list_metrics(record: Record) -> tuple[Metric, ...]:
    """Return the judged error figures of a record: the largest ratio, and the rms if it has a limit."""
    found = []
    if record.ratio is not None:
        found.append(Metric("max", record.ratio, record.limit))
    if record.rms is not None and record.rms_limit is not None:
        found.append(Metric("rms", record.rms, record.rms_limit))
    return tuple(found)


def find_decisive_metric(record: Record) -> Metric | None:
    """Return the error figure of a record that is closest to its limit or furthest beyond it, or None."""
    return max(list_metrics(record), key=lambda metric: rank_share(metric.share), default=None)


def rank_share(share: float | None) -> float:
    """Return a sort key for shares of a limit: None comes first, and NaN counts as infinity."""
    if share is None:
        return -1.0
    return math.inf if math.isnan(share) else share


def rank_record(record: Record) -> float:
    """Return a sort key for a record: its error figure closest to the limit or furthest beyond it, as a share."""
    rank = -1.0 if record.ratio is None else rank_share(compute_share(record.ratio, record.limit))
    if record.rms is None or record.rms_limit is None:
        return rank
    return max(rank, rank_share(compute_share(record.rms, record.rms_limit)))


def rank_failure(record: Record) -> tuple[float, tuple[str, ...]]:
    """Return a sort key for failures: calls that raised or have no error figure come first, then the worst."""
    metric = find_decisive_metric(record)
    crashed = record.verdict == ERROR or (record.verdict == FAIL and metric is None)
    return (-math.inf if crashed else -rank_share(metric.share if metric else None), record.key)


def find_worst_metric(records: Iterable[Record]) -> Metric | None:
    """Return the worst judged error figure of all records except expected failures.

    Expected failures count only if nothing else was judged. If they always counted, a conforming implementation could
    show an error figure beyond its limit. That figure would also hide near misses in other cases.
    """
    judged = [record for record in records if record.verdict in JUDGED]
    open_ones = [record for record in judged if record.verdict != EXPECTED_FAIL]
    with_figure = [
        record
        for record in open_ones or judged
        if record.ratio is not None or (record.rms is not None and record.rms_limit is not None)
    ]
    return find_decisive_metric(max(with_figure, key=rank_record)) if with_figure else None
