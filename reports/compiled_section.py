"""Build the report section on kernels that were compiled for accelerators without having such a chip.

Records of the check `compiles` go in. Tables come out: which programs compiled for which chip, the memory and registers
that the compilers report, and cycles counted in machine code. `reports.page_model` adds the section to the HTML page.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from reports.compiled_kernels.call_estimates import CallChart, build_call_charts
from reports.compiled_kernels.gpu_kernel_bounds import BoundTable, build_bound_table
from reports.compiled_kernels.tpu_kernel_schedules import ScheduleTable, build_schedule_table
from reports.record_groups import Compilations, Contender, get_contender, get_target, group_by
from reports.records import (
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

ALL_TARGETS = "all"
"""The target that a record names if it holds for all targets at once."""
_COMPILED = frozenset({PASS, UNEXPECTED_PASS})
_FAILED = frozenset({FAIL, ERROR, EXPECTED_FAIL})


@dataclasses.dataclass(frozen=True)
class CompiledCell:
    """The programs of one implementation, compiled for one target chip.

    Each maximum is over these programs, and None if no record has the number.
    """

    # `compiled, failed, others`: how many programs compiled, did not compile, and were not tried.
    compiled: int
    failed: int
    others: int
    seconds: float | None  # the time of the longest compilation, in seconds
    temporaries: float | None  # the most bytes of HBM that the compiler adds for temporaries
    live: float | None  # the most bytes of temporaries that are in use at the same time, in any memory
    vmem: float | None  # the most bytes of VMEM of a TPU kernel
    shared: float | None  # the most bytes of shared memory of a GPU kernel
    registers: float | None  # the most registers of a GPU thread
    spilled: float | None  # the most bytes that a GPU thread spills to memory

    @property
    def state(self) -> str:
        """The name of the cell's colour: `fail`, `pass` or `unjudged`."""
        return "fail" if self.failed else "pass" if self.compiled else "unjudged"


@dataclasses.dataclass(frozen=True)
class CompilationNote:
    """A reason why programs of one contender did not compile or were not tried.

    Attributes:
      contender, targets, verdict, reason: those of the records with this reason.
      example: the case id of the first of them.
    """

    contender: Contender
    targets: tuple[str, ...]
    verdict: str
    reason: str
    count: int
    example: str


@dataclasses.dataclass(frozen=True)
class ProgramRow:
    """A program of a case, with each implementation's largest numbers over all targets."""

    case: str
    program: str
    cells: Mapping[Contender, CompiledCell]


@dataclasses.dataclass(frozen=True)
class CompiledSection:
    """The tables of the section on compiled kernels.

    Attributes:
      contenders, targets: rows and columns of the main table; `cells` are its cells.
      programs: programs that several implementations compiled, for comparison.
      notes: reasons why programs did not compile or were not tried.
      schedules: cycles of TPU kernels, from the compiler's schedules; None if no schedule was read.
      calls: charts of the estimated cycles of whole calls on TPUs.
      bounds: lower bounds of GPU kernels, from their machine code; None if no machine code was read.
    """

    contenders: tuple[Contender, ...]
    targets: tuple[str, ...]
    cells: Mapping[tuple[Contender, str], CompiledCell]
    programs: tuple[ProgramRow, ...]
    notes: tuple[CompilationNote, ...]
    schedules: ScheduleTable | None
    calls: tuple[CallChart, ...]
    bounds: BoundTable | None


def build_compiled_section(compilations: Compilations) -> CompiledSection | None:
    """Build the section on compiled kernels, or return None if there are no records of the check `compiles`."""
    if not compilations.records:
        return None
    by_target = compilations.by_target
    return CompiledSection(
        contenders=tuple(dict.fromkeys(contender for contender, _ in by_target)),
        targets=tuple(dict.fromkeys(target for _, target in by_target if target != ALL_TARGETS)),
        cells={key: _build_cell(records) for key, records in by_target.items()},
        programs=tuple(_iter_programs(compilations)),
        notes=tuple(_build_note(*key, records) for key, records in compilations.by_reason.items()),
        schedules=build_schedule_table(compilations.records),
        calls=build_call_charts(compilations.records),
        bounds=build_bound_table(compilations.records),
    )


def _iter_programs(compilations: Compilations) -> Iterator[ProgramRow]:
    """Yield the programs that more than one implementation compiled."""
    for (case, program), records in compilations.by_program.items():
        by_contender = group_by((r for r in records if r.figures.keys() - {REFUSED}), get_contender)
        if len(by_contender) > 1:
            yield ProgramRow(case, program, {one: _build_cell(found) for one, found in by_contender.items()})


def _build_cell(records: Sequence[Record]) -> CompiledCell:
    return CompiledCell(
        compiled=sum(record.verdict in _COMPILED for record in records),
        failed=sum(record.verdict in _FAILED for record in records),
        others=sum(record.verdict in (UNJUDGED, UNSUPPORTED) for record in records),
        seconds=_find_largest(records, "compile_seconds"),
        temporaries=_find_largest(records, "temporary_bytes"),
        live=_find_largest(records, "live_bytes"),
        vmem=_find_largest(records, "vmem_bytes"),
        shared=_find_largest(records, "shared_bytes"),
        registers=_find_largest(records, "registers"),
        spilled=_find_largest(records, "spilled_bytes"),
    )


def _find_largest(records: Sequence[Record], figure: str) -> float | None:
    return max((record.figures[figure] for record in records if figure in record.figures), default=None)


def _build_note(contender: Contender, verdict: str, reason: str, records: Sequence[Record]) -> CompilationNote:
    targets = tuple(dict.fromkeys(map(get_target, records)))
    return CompilationNote(contender, targets, verdict, reason, len(records), records[0].case)
