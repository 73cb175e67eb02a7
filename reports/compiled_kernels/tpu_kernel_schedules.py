"""Build the report's table of cycles of TPU kernels.

The check `compiles` counts the cycles in the schedules that the TPU compiler writes. They are figures of its records.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from reports.record_groups import JudgedImplementation, get_implementation, get_program, get_target
from reports.records import Record

_FULL = "full_block_cycles"


@dataclasses.dataclass(frozen=True)
class ScheduleFigures:
    """Numbers from the schedule of one kernel for one TPU generation.

    A number is None if the schedule has no such part, or if the number is not known.
    """

    full: float  # cycles of the shortest block
    masked: float | None  # cycles of the longest block, which is usually one whose mask is evaluated
    step: float | None  # cycles of a step of the Pallas grid that computes no block
    share: float  # fraction of the matrix units' slots that the shortest block uses
    spills: float  # loads and stores of spilled registers in the shortest block
    loops: float | None  # number of loops within a block; the cycles count the body of each loop once
    call: float | None  # estimated cycles of the whole call
    floor: float | None  # cycles in which HBM transfers the blocks that the call moves; `call` is at least `floor`
    steps: float | None  # number of grid steps of the call
    blocks: float | None  # number of blocks that the call computes
    # Number of these blocks that are of the longest kind, as a rule those whose mask is evaluated.
    masked_blocks: float | None


@dataclasses.dataclass(frozen=True)
class ScheduleRow:
    """A kernel's numbers by TPU generation, in the case where its blocks take the most cycles."""

    implementation: JudgedImplementation
    case: str
    program: str
    kernel: str
    cells: Mapping[str, ScheduleFigures]


@dataclasses.dataclass(frozen=True)
class ScheduleTable:
    """The table of schedules, with a row for each kernel and a column for each TPU generation."""

    targets: tuple[str, ...]
    rows: tuple[ScheduleRow, ...]


def build_schedule_table(records: Sequence[Record]) -> ScheduleTable | None:
    """Build the table from records of the check `compiles`; None if no record has a schedule."""
    found: dict[tuple[JudgedImplementation, str], dict[tuple[str, str], dict[str, ScheduleFigures]]] = {}
    for record in records:
        for kernel, figures in _iter_kernels(record):
            places = found.setdefault((get_implementation(record), kernel), {})
            places.setdefault((record.case, get_program(record)), {})[get_target(record)] = figures
    if not found:
        return None
    rows = []
    for (implementation, kernel), places in found.items():
        case, program = max(places, key=lambda place: max(figures.full for figures in places[place].values()))
        rows.append(ScheduleRow(implementation, case, program, kernel, places[case, program]))
    return ScheduleTable(tuple(dict.fromkeys(target for row in rows for target in row.cells)), tuple(rows))


def _iter_kernels(record: Record) -> Iterator[tuple[str, ScheduleFigures]]:
    """Yield the name and the schedule's numbers of each TPU kernel that a record has figures of."""
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
