"""Build the table of cycles of TPU kernels, as the check `compiles` counted them in their schedules."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from conformance.records import Record
from reports.record_groups import Contender, get_contender, get_program, get_target

_FULL = "full_block_cycles"


@dataclasses.dataclass(frozen=True)
class ScheduleFigures:
    """What the schedule of a kernel shows for one generation; none where it has no such part, or it is not known.

    Attributes:
      full: cycles of the shortest block.
      masked: cycles of the longest block, as a rule one whose mask is evaluated.
      step: cycles of a step of the grid without a block.
      share: the part of the matrix units' time that the shortest block uses.
      spills: its loads and stores of spilled registers.
      loops: loops within a block, which are counted once.
      call: estimated cycles of the whole call.
      floor: cycles that HBM takes for the blocks that cross, which `call` is never below.
      steps, blocks, masked_blocks: how many the call has.
    """

    full: float
    masked: float | None
    step: float | None
    share: float
    spills: float
    loops: float | None
    call: float | None
    floor: float | None
    steps: float | None
    blocks: float | None
    masked_blocks: float | None


@dataclasses.dataclass(frozen=True)
class ScheduleRow:
    """One kernel of a program, in the case where its blocks take longest."""

    contender: Contender
    case: str
    program: str
    kernel: str
    cells: Mapping[str, ScheduleFigures]


@dataclasses.dataclass(frozen=True)
class ScheduleTable:
    """A row for each kernel, a column for each generation."""

    targets: tuple[str, ...]
    rows: tuple[ScheduleRow, ...]


def build_schedule_table(records: Sequence[Record]) -> ScheduleTable | None:
    """Build the table from records of the check `compiles`; none if they have no schedules."""
    found: dict[tuple[Contender, str], dict[tuple[str, str], dict[str, ScheduleFigures]]] = {}
    for record in records:
        for kernel, figures in _iter_kernels(record):
            places = found.setdefault((get_contender(record), kernel), {})
            places.setdefault((record.case, get_program(record)), {})[get_target(record)] = figures
    if not found:
        return None
    rows = []
    for (contender, kernel), places in found.items():
        case, program = max(places, key=lambda place: max(figures.full for figures in places[place].values()))
        rows.append(ScheduleRow(contender, case, program, kernel, places[case, program]))
    return ScheduleTable(tuple(dict.fromkeys(target for row in rows for target in row.cells)), tuple(rows))


def _iter_kernels(record: Record) -> Iterator[tuple[str, ScheduleFigures]]:
    """Yield the kernels of a program, by name."""
    for name, full in record.figures.items():
        if name.endswith(f".{_FULL}"):
            kernel = name.removesuffix(f".{_FULL}")
            yield (
                kernel,
                ScheduleFigures(
                    full=full,
                    masked=record.figures.get(f"{kernel}.masked_block_cycles"),
                    step=record.figures.get(f"{kernel}.step_cycles"),
                    share=record.figures.get(f"{kernel}.mxu_share", 0.0),
                    spills=record.figures.get(f"{kernel}.spill_slots", 0.0),
                    loops=record.figures.get(f"{kernel}.inner_loops"),
                    call=record.figures.get(f"{kernel}.call_cycles"),
                    floor=record.figures.get(f"{kernel}.hbm_floor_cycles"),
                    steps=record.figures.get(f"{kernel}.steps"),
                    blocks=record.figures.get(f"{kernel}.blocks"),
                    masked_blocks=record.figures.get(f"{kernel}.masked_blocks"),
                ),
            )
