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
from reports.conformity import Contender, get_contender

CHECK = "compiles"
ALL_TARGETS = "all"
"""The observable of a record that speaks for all targets at once."""
_COMPILED = frozenset({PASS, UNEXPECTED_PASS})
_FAILED = frozenset({FAIL, ERROR, EXPECTED_FAIL})


@dataclasses.dataclass(frozen=True)
class CompiledCell:
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
class CompilationNote:
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
    cells: Mapping[Contender, CompiledCell]


@dataclasses.dataclass(frozen=True)
class CompiledTable:
    """The section of a report."""

    contenders: tuple[Contender, ...]
    targets: tuple[str, ...]
    cells: Mapping[tuple[Contender, str], CompiledCell]
    programs: tuple[ProgramRow, ...]
    notes: tuple[CompilationNote, ...]


def build_compiled_table(records: Sequence[Record]) -> CompiledTable | None:
    """The section, none if nothing was to be compiled."""
    asked = [record for record in records if record.check == CHECK]
    if not asked:
        return None
    by_cell: dict[tuple[Contender, str], list[Record]] = {}
    by_reason: dict[tuple[Contender, str, str], list[Record]] = {}
    for record in asked:
        by_cell.setdefault((get_contender(record), get_target(record)), []).append(record)
        if record.verdict != PASS:
            by_reason.setdefault((get_contender(record), record.verdict, record.reason), []).append(record)
    return CompiledTable(
        contenders=tuple(dict.fromkeys(contender for contender, _ in by_cell)),
        targets=tuple(dict.fromkeys(target for _, target in by_cell if target != ALL_TARGETS)),
        cells={key: _build_cell(group) for key, group in by_cell.items()},
        programs=tuple(_iter_programs(asked)),
        notes=tuple(_build_note(*key, group) for key, group in by_reason.items()),
    )


def _iter_programs(asked: Sequence[Record]) -> Iterator[ProgramRow]:
    """What more than one implementation compiled."""
    found: dict[tuple[str, str], dict[Contender, list[Record]]] = {}
    for record in asked:
        if record.figures.keys() - {REFUSED}:
            program = record.observable.partition(".")[2]
            found.setdefault((record.case, program), {}).setdefault(get_contender(record), []).append(record)
    for (case, program), groups in found.items():
        if len(groups) > 1:
            yield ProgramRow(case, program, {contender: _build_cell(group) for contender, group in groups.items()})


def get_target(record: Record) -> str:
    """The target that a record is about: its observable is `target.program`."""
    return record.observable.partition(".")[0]


def _build_cell(group: Sequence[Record]) -> CompiledCell:
    return CompiledCell(
        compiled=sum(record.verdict in _COMPILED for record in group),
        failed=sum(record.verdict in _FAILED for record in group),
        others=sum(record.verdict in (UNJUDGED, UNSUPPORTED) for record in group),
        seconds=_find_largest(group, "compile_seconds"),
        temporaries=_find_largest(group, "temporary_bytes"),
        live=_find_largest(group, "live_bytes"),
        vmem=_find_largest(group, "vmem_bytes"),
        shared=_find_largest(group, "shared_bytes"),
        registers=_find_largest(group, "registers"),
        spilled=_find_largest(group, "spilled_bytes"),
    )


def _find_largest(group: Sequence[Record], figure: str) -> float | None:
    return max((record.figures[figure] for record in group if figure in record.figures), default=None)


def _build_note(contender: Contender, verdict: str, reason: str, group: Sequence[Record]) -> CompilationNote:
    targets = tuple(dict.fromkeys(map(get_target, group)))
    return CompilationNote(contender, targets, verdict, reason, len(group), group[0].case)
