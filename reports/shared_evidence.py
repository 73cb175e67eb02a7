"""What many records say together: one cause behind the mask, a declaration that explains, flags that differ."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from conformance.records import DECLARATIONS_TRIED, FLAGS_DIFFER, RED, Record
from reports.conformity import Contender, get_contender, group_by_contender

_FINITE_BEHIND_MASK = 'behind_mask="finite"'
_SHAPE = re.compile(r"B(\d+)\.T(\d+)\.S(\d+)\.N(\d+)\.K\d+\.H(\d+)\.V\d+")


@dataclasses.dataclass(frozen=True)
class MaskLeak:
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
        return _FINITE_BEHIND_MASK if self.tried else ""


@dataclasses.dataclass(frozen=True)
class Remedy:
    """Failures that a declaration would explain, which was tried."""

    contender: Contender
    remedy: str
    count: int
    tried: int  # of the contender's failures, those on which any declaration was tried
    checks: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class FlagDifference:
    """Judgements that the compiler's flags decide; those under JAX's own stand."""

    contender: Contender
    count: int
    smallest: Record


def find_mask_leaks(records: Iterable[Record]) -> tuple[list[MaskLeak], list[Record]]:
    """What NaN and infinity behind the mask did to each contender, and the records that say nothing of it."""
    leaking: dict[Contender, list[Record]] = {}
    others = []
    for record in records:
        if is_mask_leak(record):
            leaking.setdefault(get_contender(record), []).append(record)
        else:
            others.append(record)
    found = [
        MaskLeak(
            contender,
            count=len(group),
            cases=len({record.case for record in group}),
            checks=_list_checks(group),
            smallest=find_smallest(group),
            tried=sum(record.remedy == _FINITE_BEHIND_MASK for record in group),
        )
        for contender, group in sorted(leaking.items())
    ]
    return found, others


def find_remedies(records: Iterable[Record]) -> list[Remedy]:
    """Red records by contender and by the declaration that would explain them."""
    groups: dict[tuple[Contender, str], list[Record]] = {}
    tried: Counter[Contender] = Counter()
    for record in records:
        if record.verdict not in RED or not (record.remedy or DECLARATIONS_TRIED in record.figures):
            continue
        tried[get_contender(record)] += 1
        if record.remedy:
            groups.setdefault((get_contender(record), record.remedy), []).append(record)
    return [
        Remedy(contender, remedy, len(group), tried[contender], _list_checks(group))
        for (contender, remedy), group in sorted(groups.items())
    ]


def find_flag_differences(records: Iterable[Record]) -> list[FlagDifference]:
    """Of each contender, the judgements that differ by the compiler's flags."""
    different = [record for record in records if FLAGS_DIFFER in record.figures]
    return [
        FlagDifference(contender, len(group), find_smallest(group))
        for contender, group in group_by_contender(different).items()
    ]


def find_smallest(records: Sequence[Record]) -> Record:
    """The record of the smallest case."""
    return min(records, key=lambda record: (_compute_size(record.case), record.key))


def is_mask_leak(record: Record) -> bool:
    """Whether it is red since NaN or infinity behind the mask reaches a result."""
    return record.verdict in RED and (is_mask_poison(record) or record.remedy == _FINITE_BEHIND_MASK)


def is_mask_poison(record: Record) -> bool:
    """Whether NaN or infinity was put behind the mask."""
    return record.check == "poison" and record.observable.rpartition(".")[2] in ("nan", "inf")


def _list_checks(records: Iterable[Record]) -> tuple[str, ...]:
    return tuple(check for check, _ in Counter(record.check for record in records).most_common())


def _compute_size(case: str) -> float:
    shape = _SHAPE.search(case)
    return math.prod(map(int, shape.groups())) if shape else math.inf
