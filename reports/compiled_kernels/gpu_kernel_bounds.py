"""Bounds of GPU kernels, as the check `compiles` counted them in their machine code: by kernel, and side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from conformance.records import Record
from reports.compiled_kernels.call_estimates import CallChart, CallEstimate, choose_charts
from reports.compiled_section import CHECK, get_target
from reports.conformity import Contender, get_contender

_LEAST_CYCLES = "pair_cycles"
_UNITS = ("issue", "tensor", "mufu", "f32", "alu", "convert", "shared")
_THOUSAND = 1e3  # of cycles for 1,000 pairs, to kilocycles for a million of them


@dataclasses.dataclass(frozen=True)
class KernelBound:
    """A kernel for one GPU: cycles for 1,000 pairs of a full block, and what it holds of a multiprocessor.

    Of masked blocks, and of the schedulers alone, cycles too.
    """

    least: float
    unit: str
    masked: float
    issue: float
    masked_issue: float
    registers: float
    spilled: float
    spill_slots: float
    occupancy: float


@dataclasses.dataclass(frozen=True)
class BoundRow:
    """One kernel of a program, in the case where it takes most cycles a pair."""

    contender: Contender
    case: str
    program: str
    kernel: str
    cells: Mapping[str, KernelBound]


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The section of a report: which GPUs, a row for each kernel, and charts of the same program side by side."""

    targets: tuple[str, ...]
    rows: tuple[BoundRow, ...]
    charts: tuple[CallChart, ...]


def build_bounds(records: Sequence[Record]) -> Bounds | None:
    """The section, none if no kernel was taken apart."""
    found: dict[tuple[Contender, str], dict[tuple[str, str], dict[str, KernelBound]]] = {}
    sums: dict[tuple[str, str], dict[tuple[Contender, str], CallEstimate]] = {}
    for record in records:
        kernels = dict(_iter_kernels(record)) if record.check == CHECK else {}
        if not kernels:
            continue
        program, contender, target = record.observable.partition(".")[2], get_contender(record), get_target(record)
        for kernel, one in kernels.items():
            of_kernel = found.setdefault((contender, kernel), {})
            of_kernel.setdefault((record.case, program), {})[target] = one
        cycles = {kernel: _THOUSAND * one.least for kernel, one in kernels.items()}
        sums.setdefault((record.case, program), {})[contender, target] = CallEstimate(cycles, frozenset())
    if not found:
        return None
    rows = []
    for (contender, kernel), asked in found.items():
        case, program = max(asked, key=lambda key: max(one.least for one in asked[key].values()))
        rows.append(BoundRow(contender, case, program, kernel, asked[case, program]))
    return Bounds(
        tuple(dict.fromkeys(target for row in rows for target in row.cells)), tuple(rows), choose_charts(sums)
    )


def _iter_kernels(record: Record) -> Iterator[tuple[str, KernelBound]]:
    for name, least in record.figures.items():
        if name.endswith(f".{_LEAST_CYCLES}"):
            kernel = name.removesuffix(f".{_LEAST_CYCLES}")
            told = {figure: record.figures.get(f"{kernel}.{figure}", 0.0) for figure in _FIGURES}
            yield (
                kernel,
                KernelBound(
                    least=least,
                    unit=max(_UNITS, key=lambda unit: told[f"{unit}_cycles"]),
                    masked=told[f"masked_{_LEAST_CYCLES}"],
                    issue=told["issue_cycles"],
                    masked_issue=told["masked_issue_cycles"],
                    registers=told["registers"],
                    spilled=told["spilled_bytes"],
                    spill_slots=told["spill_slots"],
                    occupancy=told["occupancy"],
                ),
            )


_FIGURES = (
    *(f"{unit}_cycles" for unit in _UNITS),
    *(f"masked_{_LEAST_CYCLES}", "masked_issue_cycles", "registers", "spilled_bytes", "spill_slots", "occupancy"),
)
