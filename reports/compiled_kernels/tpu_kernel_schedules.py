"""Cycles of TPU kernels, as the check `compiles` counted them in their schedules: by kernel and generation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from conformance.records import Record
from reports.compiled_section import CHECK, get_target
from reports.conformity import Contender, get_contender

_FULL = "full_block_cycles"


@dataclasses.dataclass(frozen=True)
class ScheduleFigures:
    """A kernel for one generation: cycles of a block, of a masked one and of a step without any, and what fills them.

    Then its whole call: the estimate, below which HBM holds it, and how many steps, blocks and masked blocks there are.
    None where a schedule has no such part, or where it is not known.
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
class Schedules:
    """The section of a report: which generations, and a row for each kernel."""

    targets: tuple[str, ...]
    rows: tuple[ScheduleRow, ...]


def build_schedules(records: Sequence[Record]) -> Schedules | None:
    """The section, none if no schedule was read."""
    found: dict[tuple[Contender, str], dict[tuple[str, str], dict[str, ScheduleFigures]]] = {}
    for record in records:
        if record.check == CHECK:
            program = record.observable.partition(".")[2]
            for kernel, parts in _iter_kernels(record):
                of_kernel = found.setdefault((get_contender(record), kernel), {})
                of_kernel.setdefault((record.case, program), {})[get_target(record)] = parts
    if not found:
        return None
    rows = []
    for (contender, kernel), asked in found.items():
        case, program = max(asked, key=lambda key: max(parts.full for parts in asked[key].values()))
        rows.append(ScheduleRow(contender, case, program, kernel, asked[case, program]))
    return Schedules(tuple(dict.fromkeys(target for row in rows for target in row.cells)), tuple(rows))


def _iter_kernels(record: Record) -> Iterator[tuple[str, ScheduleFigures]]:
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
