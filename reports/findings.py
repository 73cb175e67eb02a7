"""What many records say together: one cause behind the mask, a declaration that explains, flags that differ."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from conformance.records import DECLARATIONS_TRIED, FLAGS_DIFFER, RED, Record
from reports.summary import Contender, by_contender, contender_of

_BEHIND_MASK = 'behind_mask="finite"'
_SHAPE = re.compile(r"B(\d+)\.T(\d+)\.S(\d+)\.N(\d+)\.K\d+\.H(\d+)\.V\d+")


@dataclasses.dataclass(frozen=True)
class BehindMask:
    """NaN or infinity behind the mask matters: all failures that say so, as one."""

    contender: Contender
    count: int
    cases: int
    checks: tuple[str, ...]
    smallest: Record
    tried: int  # how many pass where what lies behind the mask is declared to be finite

    @property
    def remedy(self) -> str:
        """The declaration that explains them, empty if it was not seen to."""
        return _BEHIND_MASK if self.tried else ""


@dataclasses.dataclass(frozen=True)
class Explained:
    """Failures that a declaration would explain, which was tried."""

    contender: Contender
    remedy: str
    count: int
    tried: int  # of the contender's failures, those on which any declaration was tried
    checks: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class FlagsDiffer:
    """Judgements that the compiler's flags decide; those under JAX's own stand."""

    contender: Contender
    count: int
    smallest: Record


def behind_mask(records: Iterable[Record]) -> tuple[list[BehindMask], list[Record]]:
    """What NaN and infinity behind the mask did to each contender, and the records that say nothing of it."""
    leaking: dict[Contender, list[Record]] = {}
    others = []
    for record in records:
        if leaks(record):
            leaking.setdefault(contender_of(record), []).append(record)
        else:
            others.append(record)
    found = [
        BehindMask(
            contender,
            count=len(group),
            cases=len({record.case for record in group}),
            checks=_checks(group),
            smallest=smallest(group),
            tried=sum(record.remedy == _BEHIND_MASK for record in group),
        )
        for contender, group in sorted(leaking.items())
    ]
    return found, others


def explained(records: Iterable[Record]) -> list[Explained]:
    """Red records by contender and by the declaration that would explain them."""
    groups: dict[tuple[Contender, str], list[Record]] = {}
    tried: Counter[Contender] = Counter()
    for record in records:
        if record.verdict not in RED or not (record.remedy or DECLARATIONS_TRIED in record.figures):
            continue
        tried[contender_of(record)] += 1
        if record.remedy:
            groups.setdefault((contender_of(record), record.remedy), []).append(record)
    return [
        Explained(contender, remedy, len(group), tried[contender], _checks(group))
        for (contender, remedy), group in sorted(groups.items())
    ]


def flags_differ(records: Iterable[Record]) -> list[FlagsDiffer]:
    """Of each contender, the judgements that differ by the compiler's flags."""
    different = [record for record in records if FLAGS_DIFFER in record.figures]
    return [FlagsDiffer(contender, len(group), smallest(group)) for contender, group in by_contender(different).items()]


def smallest(records: Sequence[Record]) -> Record:
    """The record of the smallest case."""
    return min(records, key=lambda record: (_size(record.case), record.key))


def leaks(record: Record) -> bool:
    """Whether it is red since NaN or infinity behind the mask reaches a result."""
    return record.verdict in RED and (poisons(record) or record.remedy == _BEHIND_MASK)


def poisons(record: Record) -> bool:
    """Whether NaN or infinity was put behind the mask."""
    return record.check == "poison" and record.observable.rpartition(".")[2] in ("nan", "inf")


def _checks(records: Iterable[Record]) -> tuple[str, ...]:
    return tuple(check for check, _ in Counter(record.check for record in records).most_common())


def _size(case: str) -> float:
    shape = _SHAPE.search(case)
    return math.prod(map(int, shape.groups())) if shape else math.inf
