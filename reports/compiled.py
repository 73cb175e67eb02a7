"""What was compiled for accelerators that are not there: by implementation and target, with the compiler's figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from conformance.records import (
    ERROR,
    EXPECTED_FAIL,
    FAIL,
    PASS,
    REFUSED,
    UNEXPECTED_PASS,
    UNJUDGED,
    UNSUPPORTED,
    Record,
)
from reports.summary import Contender, contender_of

CHECK = "compiles"
EVERY_TARGET = "all"
"""The observable of a record that speaks for all targets at once."""
_COMPILED = frozenset({PASS, UNEXPECTED_PASS})
_FAILED = frozenset({FAIL, ERROR, EXPECTED_FAIL})


@dataclasses.dataclass(frozen=True)
class Cell:
    """The programs of one implementation for one target: how many compiled, and the largest of each figure."""

    compiled: int
    failed: int
    others: int
    seconds: float | None
    temporaries: float | None
    live: float | None
    vmem: float | None
    shared: float | None
    registers: float | None
    spilled: float | None

    @property
    def state(self) -> str:
        """The word that colours the cell."""
        return "fail" if self.failed else "pass" if self.compiled else "unjudged"


@dataclasses.dataclass(frozen=True)
class Note:
    """Why something did not compile or was not tried, and how often."""

    contender: Contender
    targets: tuple[str, ...]
    verdict: str
    reason: str
    count: int
    example: str


@dataclasses.dataclass(frozen=True)
class ProgramRow:
    """One program of one case that several implementations have, side by side: the largest figures over the targets."""

    case: str
    program: str
    cells: Mapping[Contender, Cell]


@dataclasses.dataclass(frozen=True)
class CompiledTable:
    """The section of a report."""

    contenders: tuple[Contender, ...]
    targets: tuple[str, ...]
    cells: Mapping[tuple[Contender, str], Cell]
    programs: tuple[ProgramRow, ...]
    notes: tuple[Note, ...]


def compiled(records: Sequence[Record]) -> CompiledTable | None:
    """The section, none if nothing was to be compiled."""
    asked = [record for record in records if record.check == CHECK]
    if not asked:
        return None
    by_cell: dict[tuple[Contender, str], list[Record]] = {}
    by_reason: dict[tuple[Contender, str, str], list[Record]] = {}
    for record in asked:
        by_cell.setdefault((contender_of(record), target_of(record)), []).append(record)
        if record.verdict != PASS:
            by_reason.setdefault((contender_of(record), record.verdict, record.reason), []).append(record)
    return CompiledTable(
        contenders=tuple(dict.fromkeys(contender for contender, _ in by_cell)),
        targets=tuple(dict.fromkeys(target for _, target in by_cell if target != EVERY_TARGET)),
        cells={key: _cell(group) for key, group in by_cell.items()},
        programs=tuple(_programs(asked)),
        notes=tuple(_note(*key, group) for key, group in by_reason.items()),
    )


def _programs(asked: Sequence[Record]) -> Iterator[ProgramRow]:
    """What more than one implementation compiled."""
    found: dict[tuple[str, str], dict[Contender, list[Record]]] = {}
    for record in asked:
        if record.figures.keys() - {REFUSED}:
            program = record.observable.partition(".")[2]
            found.setdefault((record.case, program), {}).setdefault(contender_of(record), []).append(record)
    for (case, program), groups in found.items():
        if len(groups) > 1:
            yield ProgramRow(case, program, {contender: _cell(group) for contender, group in groups.items()})


def target_of(record: Record) -> str:
    """The target that a record is about: its observable is `target.program`."""
    return record.observable.partition(".")[0]


def _cell(group: Sequence[Record]) -> Cell:
    return Cell(
        compiled=sum(record.verdict in _COMPILED for record in group),
        failed=sum(record.verdict in _FAILED for record in group),
        others=sum(record.verdict in (UNJUDGED, UNSUPPORTED) for record in group),
        seconds=_most(group, "compile_seconds"),
        temporaries=_most(group, "temporary_bytes"),
        live=_most(group, "live_bytes"),
        vmem=_most(group, "vmem_bytes"),
        shared=_most(group, "shared_bytes"),
        registers=_most(group, "registers"),
        spilled=_most(group, "spilled_bytes"),
    )


def _most(group: Sequence[Record], figure: str) -> float | None:
    return max((record.figures[figure] for record in group if figure in record.figures), default=None)


def _note(contender: Contender, verdict: str, reason: str, group: Sequence[Record]) -> Note:
    targets = tuple(dict.fromkeys(map(target_of, group)))
    return Note(contender, targets, verdict, reason, len(group), group[0].case)
