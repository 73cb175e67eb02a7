"""Build the report's table of lower bounds on the cycles of GPU kernels.

The check `compiles` counts the bounds in machine code. They are figures of its records.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from reports.compiled_kernels.call_estimates import CallChart, CallEstimate, choose_charts
from reports.record_groups import JudgedImplementation, get_implementation, get_program, get_target
from reports.records import Record

_LEAST_CYCLES = "pair_cycles"
_UNITS = ("issue", "tensor", "mufu", "f32", "alu", "convert", "shared")
_FIGURES = (
    *(f"{unit}_cycles" for unit in _UNITS),
    *(f"masked_{_LEAST_CYCLES}", "masked_issue_cycles", "registers", "spilled_bytes", "spill_slots", "occupancy"),
)
_PAIRS = 1e3  # turns cycles for 1,000 pairs of query and key into cycles for 1,000,000 pairs


@dataclasses.dataclass(frozen=True)
class KernelBound:
    """Lower bounds on a kernel's cycles on one GPU, and the registers and warps that it uses.

    All cycles are for 1,000 pairs of query and key.
    """

    least: float  # lower bound for a block in which no pair is masked
    unit: str  # the unit of the multiprocessor that needs the most cycles
    masked: float  # lower bound for a block in which the mask is evaluated
    # `issue, masked_issue`: cycles to issue the instructions: `issue` for an unmasked block, `masked_issue` for a
    # masked one.
    issue: float
    masked_issue: float
    registers: float
    spilled: float
    spill_slots: float  # instructions in the loop that load or store spilled registers
    occupancy: float  # resident warps, as a fraction of the most that a multiprocessor can hold


@dataclasses.dataclass(frozen=True)
class BoundRow:
    """A kernel's bounds by GPU, in the case where it takes the most cycles per pair of query and key."""

    implementation: JudgedImplementation
    case: str
    program: str
    kernel: str
    cells: Mapping[str, KernelBound]


@dataclasses.dataclass(frozen=True)
class BoundTable:
    """The table of bounds by kernel and GPU, and charts that compare programs between implementations."""

    targets: tuple[str, ...]
    rows: tuple[BoundRow, ...]
    charts: tuple[CallChart, ...]


def build_bound_table(records: Sequence[Record]) -> BoundTable | None:
    """Build the table from records of the check `compiles`; None if no record has bounds of a GPU kernel."""
    found: dict[tuple[JudgedImplementation, str], dict[tuple[str, str], dict[str, KernelBound]]] = {}
    sums: dict[tuple[str, str], dict[tuple[JudgedImplementation, str], CallEstimate]] = {}
    for record in records:
        kernels = dict(_iter_kernels(record))
        if not kernels:
            continue
        implementation, target = get_implementation(record), get_target(record)
        place = record.case, get_program(record)
        for kernel, bound in kernels.items():
            found.setdefault((implementation, kernel), {}).setdefault(place, {})[target] = bound
        cycles = {kernel: _PAIRS * bound.least for kernel, bound in kernels.items()}
        sums.setdefault(place, {})[implementation, target] = CallEstimate(cycles, frozenset())
    if not found:
        return None
    rows = []
    for (implementation, kernel), places in found.items():
        case, program = max(places, key=lambda place: max(bound.least for bound in places[place].values()))
        rows.append(BoundRow(implementation, case, program, kernel, places[case, program]))
    targets = tuple(dict.fromkeys(target for row in rows for target in row.cells))
    return BoundTable(targets, tuple(rows), choose_charts(sums))


def _iter_kernels(record: Record) -> Iterator[tuple[str, KernelBound]]:
    """Yield the name and the bounds of each GPU kernel that a record has figures of."""
    for name, least in record.figures.items():
        if name.endswith(f".{_LEAST_CYCLES}"):
            kernel = name.removesuffix(f".{_LEAST_CYCLES}")
            figures = {figure: record.figures.get(f"{kernel}.{figure}", 0.0) for figure in _FIGURES}
            yield (
                kernel,
                KernelBound(
                    least=least,
                    unit=max(_UNITS, key=lambda unit: figures[f"{unit}_cycles"]),
                    masked=figures[f"masked_{_LEAST_CYCLES}"],
                    issue=figures["issue_cycles"],
                    masked_issue=figures["masked_issue_cycles"],
                    registers=figures["registers"],
                    spilled=figures["spilled_bytes"],
                    spill_slots=figures["spill_slots"],
                    occupancy=figures["occupancy"],
                ),
            )
