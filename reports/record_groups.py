"""Group the records of a run once, by every key that the reports need.

An implementation on two platforms is judged as two. An observable is the name of a judged result: `out`, `dq`, ...
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct

from reports.records import PASS, UNJUDGED, UNSUPPORTED, Record

NO_FEATURE = "(none named)"
"""The matrix column of records that name no feature, so that no record is missing from the matrix."""
COMPILES = "compiles"
"""The check that compiles for accelerators; its observables are `target.program`."""

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


class JudgedImplementation(Struct, frozen=True, order=True, cache_hash=True):
    """An implementation on one platform, which is what a verdict is about.

    Attributes:
      name: the name of the implementation.
      platform: the platform on which it was judged, such as `cpu`.
      run: distinguishes runs of different provenance (code, versions, machine); empty if there is only one.
    """

    name: str
    platform: str
    run: str = ""

    @property
    def place(self) -> str:
        """The platform, followed by the run if there are several."""
        return ", ".join(filter(None, (self.platform, self.run)))

    @property
    def label(self) -> str:
        """The name of the implementation, followed by the platform and run in brackets."""
        return f"{self.name} ({self.place})" if self.place else self.name


@dataclasses.dataclass(frozen=True)
class Compilations:
    """The records of the check `compiles`, in order and grouped for the section on compiled kernels.

    Attributes:
      records: all records of the check.
      by_target: records by implementation and target chip.
      by_program: records by case and program, of all implementations and targets.
      by_reason: records that did not pass, by implementation, verdict and reason.
    """

    records: Sequence[Record]
    by_target: Mapping[tuple[JudgedImplementation, str], Sequence[Record]]
    by_program: Mapping[tuple[str, str], Sequence[Record]]
    by_reason: Mapping[tuple[JudgedImplementation, str, str], Sequence[Record]]


@dataclasses.dataclass(frozen=True)
class RecordGroups:
    """The records of a run, in order and grouped by each key that the reports need.

    Attributes:
      records: all records.
      by_implementation: records by implementation, implementations in the order of their names.
      by_case: records by case id.
      by_check: records by implementation and check.
      by_dtype: records by dtype and observable.
      by_gradient: records by implementation, observable and dtype.
      by_reason: unsupported and unjudged records by implementation, verdict and reason.
      compilations: records of the check `compiles`.
    """

    records: Sequence[Record]
    by_implementation: Mapping[JudgedImplementation, Sequence[Record]]
    by_case: Mapping[str, Sequence[Record]]
    by_check: Mapping[tuple[JudgedImplementation, str], Sequence[Record]]
    by_dtype: Mapping[tuple[str, str], Sequence[Record]]
    by_gradient: Mapping[tuple[JudgedImplementation, str, str], Sequence[Record]]
    by_reason: Mapping[tuple[JudgedImplementation, str, str], Sequence[Record]]
    compilations: Compilations


def get_implementation(record: Record) -> JudgedImplementation:
    """Return the implementation that a record is about."""
    return _build_judged_implementation(record.implementation, record.platform, record.run)


@functools.lru_cache(maxsize=4096)
def _build_judged_implementation(name: str, platform: str, run: str) -> JudgedImplementation:
    return JudgedImplementation(name, platform, run)


def get_target(record: Record) -> str:
    """Return the target chip that a record of the check `compiles` names."""
    return record.observable.partition(".")[0]


def get_program(record: Record) -> str:
    """Return the compiled program that a record of the check `compiles` names."""
    return record.observable.partition(".")[2]


def list_record_features(record: Record) -> tuple[str, ...]:
    """Return the features of a record, each once, or `NO_FEATURE` if it names none."""
    return _list_distinct(record.features) or (NO_FEATURE,)


@functools.lru_cache(maxsize=4096)
def _list_distinct(features: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(features))


def group_by(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Group items by a key. Keys are in order of first appearance, and the items of a key keep their order."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def group_by_implementation(records: Iterable[Record]) -> dict[JudgedImplementation, list[Record]]:
    """Group records by implementation, implementations in the order of their names."""
    groups = group_by(records, get_implementation)
    return {implementation: groups[implementation] for implementation in sorted(groups)}


def group_by_result(records: Iterable[Record]) -> dict[tuple[JudgedImplementation, str, str, str], list[Record]]:
    """Group records by implementation, check, observable and verdict."""
    return group_by(records, lambda r: (get_implementation(r), r.check, r.observable, r.verdict))


def group_records(records: Sequence[Record]) -> RecordGroups:
    """Group the records of a run by every key that the reports need."""
    without_judgement = (record for record in records if record.verdict in (UNSUPPORTED, UNJUDGED))
    return RecordGroups(
        records=records,
        by_implementation=group_by_implementation(records),
        by_case=group_by(records, lambda record: record.case),
        by_check=group_by(records, lambda record: (get_implementation(record), record.check)),
        by_dtype=group_by(records, lambda record: (record.dtype, record.observable)),
        by_gradient=group_by(records, lambda record: (get_implementation(record), record.observable, record.dtype)),
        by_reason=group_by(without_judgement, _get_reason),
        compilations=_group_compilations([record for record in records if record.check == COMPILES]),
    )


def _group_compilations(records: Sequence[Record]) -> Compilations:
    return Compilations(
        records=records,
        by_target=group_by(records, lambda record: (get_implementation(record), get_target(record))),
        by_program=group_by(records, lambda record: (record.case, get_program(record))),
        by_reason=group_by((record for record in records if record.verdict != PASS), _get_reason),
    )


def _get_reason(record: Record) -> tuple[JudgedImplementation, str, str]:
    return get_implementation(record), record.verdict, record.reason
