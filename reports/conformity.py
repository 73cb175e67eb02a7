"""What the records of a run add up to: conformity, counts, matrices, failures and reasons.

A contender is an implementation on a platform. An observable is a result that is judged, by name: `out`, `dq`, ...
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from conformance.records import (
    ERROR,
    EXPECTED_FAIL,
    FAIL,
    JUDGED,
    RED,
    REFUSED,
    UNJUDGED,
    UNSUPPORTED,
    VERDICTS,
    Record,
)

CONFORMS = "conforms"
KNOWN_FAILURES = "conforms but for known failures"
DOES_NOT_CONFORM = "does not conform"
NOT_JUDGED = "could not be judged"


@dataclasses.dataclass(frozen=True, order=True)
class Contender:
    """What a verdict is about: one implementation on one platform; `run` tells apart what several runs say of it."""

    implementation: str
    platform: str
    run: str = ""

    @property
    def place(self) -> str:
        """Where it was judged: the platform, and the run where there are several."""
        return ", ".join(filter(None, (self.platform, self.run)))

    @property
    def label(self) -> str:
        """The implementation with its place in brackets."""
        return f"{self.implementation} ({self.place})" if self.place else self.implementation


@dataclasses.dataclass(frozen=True)
class Metric:
    """A figure that was judged and the limit it was judged against: `max` is the largest ratio, `rms` its mean."""

    name: str
    value: float
    limit: float | None

    @property
    def share(self) -> float | None:
        """Value over limit: above 1 is over the limit. A limit of zero admits only zero."""
        if self.limit is None:
            return None
        if self.limit == 0:
            return self.value if math.isnan(self.value) else (0.0 if self.value == 0 else math.inf)
        return self.value / self.limit


@dataclasses.dataclass(frozen=True)
class Counts:
    """Records by verdict; every verdict is present."""

    by_verdict: Mapping[str, int]

    def __getitem__(self, verdict: str) -> int:
        """How many records have this verdict."""
        return self.by_verdict.get(verdict, 0)

    @property
    def total(self) -> int:
        """The number of records counted."""
        return sum(self.by_verdict.values())

    @property
    def red(self) -> int:
        """Records that make a run not conform."""
        return sum(self[verdict] for verdict in RED)

    @property
    def judged(self) -> int:
        """Records that rest on a comparison which took place."""
        return sum(self[verdict] for verdict in JUDGED)

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """Verdicts that occur, with their counts, in the order of `VERDICTS`."""
        return tuple((verdict, self[verdict]) for verdict in VERDICTS if self[verdict])


@dataclasses.dataclass(frozen=True)
class Standing:
    """One line of the verdict: whether the contender conforms, and the counts that say so."""

    contender: Contender
    conformity: str
    counts: Counts
    worst: Metric | None
    seconds: float
    checks: tuple[str, ...] = ()  # those that judged something
    refused: tuple[str, ...] = ()  # those whose calls raised `NotImplementedError` in most cases that were asked
    undeclared: int = 0  # how many questions such calls refused, of cases that it takes by what it declares

    @property
    def one_check(self) -> str:
        """The check that judged alone; empty where there are several. One question answered is no conformity."""
        return self.checks[0] if len(self.checks) == 1 else ""


@dataclasses.dataclass(frozen=True)
class FailureGroup:
    """Records of one contender, check, observable and verdict, worst first; `shown` of them fit into the report."""

    contender: Contender
    check: str
    observable: str
    verdict: str
    records: tuple[Record, ...]
    shown: int
    common_features: tuple[str, ...]

    @property
    def hidden(self) -> int:
        """How many of the group's records the report leaves to the JSON lines."""
        return len(self.records) - self.shown

    @property
    def common_reason(self) -> str:
        """The reason that all records of the group give, empty where they differ or are alone."""
        reasons = {record.reason for record in self.records}
        return self.records[0].reason if len(reasons) == 1 and len(self.records) > 1 else ""


@dataclasses.dataclass(frozen=True)
class ReasonGroup:
    """Records without judgement that share a reason, with one case as an example."""

    contender: Contender
    verdict: str
    reason: str
    count: int
    example: str


@dataclasses.dataclass(frozen=True)
class UndecidedRows:
    """Rows of its cases that no record judges, since rounding could change which keys their queries choose."""

    contender: Contender
    cases: int
    rows: int
    of_rows: int
    worst_case: str  # the one with the largest share


def get_contender(record: Record) -> Contender:
    """The contender that a record is about."""
    return Contender(record.implementation, record.platform, record.run)


def list_metrics(record: Record) -> tuple[Metric, ...]:
    """The figures of a record that were judged: the largest ratio, and the rms where that has a limit."""
    found = []
    if record.ratio is not None:
        found.append(Metric("max", record.ratio, record.limit))
    if record.rms is not None and record.rms_limit is not None:
        found.append(Metric("rms", record.rms, record.rms_limit))
    return tuple(found)


def find_decisive_metric(record: Record) -> Metric | None:
    """The judged figure closest to its limit or furthest beyond it."""
    return max(list_metrics(record), key=lambda metric: rank_share(metric.share), default=None)


def rank_share(share: float | None) -> float:
    """A sort key for shares: NaN is as bad as infinity, no share at all comes first."""
    if share is None:
        return -1.0
    return math.inf if math.isnan(share) else share


def find_worst_metric(records: Iterable[Record]) -> Metric | None:
    """The worst judged figure; expected failures only stand in where nothing else was judged.

    If they counted like the others, a contender that conforms could show a figure beyond its limit. A near miss of
    another case would be hidden by it.
    """
    judged = [record for record in records if record.verdict in JUDGED]
    open_ones = [record for record in judged if record.verdict != EXPECTED_FAIL]
    found = (find_decisive_metric(record) for record in open_ones or judged)
    return max((m for m in found if m is not None), key=lambda metric: rank_share(metric.share), default=None)


def count_verdicts(records: Iterable[Record]) -> Counts:
    """Count records by verdict."""
    counter = Counter(record.verdict for record in records)
    return Counts({verdict: counter[verdict] for verdict in VERDICTS})


def compute_conformity(records: Iterable[Record]) -> str:
    """Whether these records say that it conforms, with known failures or without, does not, or could not be judged.

    Any red record means that it does not conform. Without a single judged record there is nothing to conform by, which
    is never the same as clean.
    """
    counts = count_verdicts(records)
    if counts.red:
        return DOES_NOT_CONFORM
    if not counts.judged:
        return NOT_JUDGED
    return KNOWN_FAILURES if counts[EXPECTED_FAIL] else CONFORMS


def group_by_contender(records: Iterable[Record]) -> dict[Contender, list[Record]]:
    """Records of each contender, contenders in the order of their names."""
    groups: dict[Contender, list[Record]] = {}
    for record in records:
        groups.setdefault(get_contender(record), []).append(record)
    return {contender: groups[contender] for contender in sorted(groups)}


def build_standings(records: Iterable[Record]) -> tuple[Standing, ...]:
    """One standing for each contender, in the order of their names: nothing here ranks them."""
    return tuple(
        Standing(
            contender,
            compute_conformity(group),
            count_verdicts(group),
            find_worst_metric(group),
            math.fsum(r.seconds for r in group),
            tuple(dict.fromkeys(record.check for record in group if record.verdict in JUDGED)),
            _find_refused_checks(group),
            sum(REFUSED in record.figures for record in group),
        )
        for contender, group in group_by_contender(records).items()
    )


def _find_refused_checks(records: Iterable[Record]) -> tuple[str, ...]:
    """The checks of supported cases, most of which were refused as a whole by what the call raised."""
    cases: dict[str, dict[str, bool]] = {}
    for record in records:
        refused = REFUSED in record.figures and record.observable == "all"
        if record.verdict in JUDGED or refused:
            asked = cases.setdefault(record.check, {})
            asked[record.case] = asked.get(record.case, True) and refused
    return tuple(check for check, asked in cases.items() if 2 * sum(asked.values()) > len(asked))


def iter_not_judged(records: Iterable[Record]) -> Iterator[tuple[Contender, str]]:
    """Contenders that could not be judged, each with the commonest reason why; what is unsupported is asked last."""
    for contender, group in group_by_contender(records).items():
        if compute_conformity(group) != NOT_JUDGED:
            continue
        for verdict in (UNJUDGED, UNSUPPORTED):
            if reasons := Counter(record.reason for record in group if record.verdict == verdict and record.reason):
                yield contender, reasons.most_common(1)[0][0]
                break


def group_failures(records: Iterable[Record], *, verdicts: Iterable[str] = RED, cap: int = 200) -> list[FailureGroup]:
    """Failures grouped by contender, check, observable and verdict; at most `cap` of them are marked as shown.

    The cap is shared out evenly, so that one noisy check cannot push the others out of the report.
    """
    wanted = frozenset(verdicts)
    groups: dict[tuple[Contender, str, str, str], list[Record]] = {}
    for record in records:
        if record.verdict in wanted:
            groups.setdefault((get_contender(record), record.check, record.observable, record.verdict), []).append(
                record
            )
    keys = sorted(groups)
    ranked = [tuple(sorted(groups[key], key=_rank_failure)) for key in keys]
    quotas = _distribute_quota([len(group) for group in ranked], [_rank_failure(group[0]) for group in ranked], cap)
    return [
        FailureGroup(*key, records=group, shown=quota, common_features=_find_common_features(group))
        for key, group, quota in zip(keys, ranked, quotas, strict=True)
    ]


def first_failures(records: Iterable[Record], *, cap: int) -> tuple[list[Record], int]:
    """At most `cap` red records, spread over the groups of failures, and how many more there are."""
    groups = group_failures(records, cap=cap)
    shown = [record for group in groups for record in group.records[: group.shown]]
    return shown, sum(group.hidden for group in groups)


def group_reasons(records: Iterable[Record]) -> list[ReasonGroup]:
    """Unsupported and unjudged records by contender and reason, the most frequent first within a contender."""
    tally: Counter[tuple[Contender, str, str]] = Counter()
    examples: dict[tuple[Contender, str, str], str] = {}
    for record in records:
        if record.verdict in (UNSUPPORTED, UNJUDGED):
            key = (get_contender(record), record.verdict, record.reason)
            tally[key] += 1
            examples.setdefault(key, record.case)
    order = sorted(tally, key=lambda key: (key[0], key[1], -tally[key], key[2]))
    return [ReasonGroup(*key, count=tally[key], example=examples[key]) for key in order]


def find_undecided_rows(records: Iterable[Record]) -> list[UndecidedRows]:
    """What the records of each contender leave out of the cases that they judge; a case counts once."""
    found = []
    for contender, group in group_by_contender(records).items():
        cases = {r.case: (r.figures["undecided_rows"], r.figures["rows"]) for r in group if _has_undecided_rows(r)}
        if cases:
            rows, of_rows = (int(math.fsum(column)) for column in zip(*cases.values(), strict=True))
            worst = max(cases, key=lambda case: cases[case][0] / cases[case][1])
            found.append(UndecidedRows(contender, len(cases), rows, of_rows, worst))
    return found


def _has_undecided_rows(record: Record) -> bool:
    return record.verdict in JUDGED and "undecided_rows" in record.figures


def _rank_failure(record: Record) -> tuple[float, tuple[str, ...]]:
    metric = find_decisive_metric(record)
    crashed = record.verdict == ERROR or (record.verdict == FAIL and metric is None)
    return (-math.inf if crashed else -rank_share(metric.share if metric else None), record.key)


def _find_common_features(records: Sequence[Record]) -> tuple[str, ...]:
    common = set(records[0].features).intersection(*(record.features for record in records))
    return tuple(feature for feature in dict.fromkeys(records[0].features) if feature in common)


def _distribute_quota(sizes: Sequence[int], ranks: Sequence[tuple[float, tuple[str, ...]]], cap: int) -> list[int]:
    order = sorted(range(len(sizes)), key=lambda i: ranks[i])
    quotas = [0] * len(sizes)
    while cap > 0 and (open_groups := [i for i in order if quotas[i] < sizes[i]]):
        for i in open_groups[:cap]:
            quotas[i] += 1
        cap -= min(cap, len(open_groups))
    return quotas
