"""Build charts of the estimated cycles of whole calls on TPUs, implementations side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from conformance.records import Record
from reports.record_groups import Contender, get_contender, get_program, get_target

MAX_CHARTS = 4
"""Charts of a page: calls that the most implementations have, and of these the longest."""
_BLOCK, _CALL, _FLOOR = ".full_block_cycles", ".call_cycles", ".hbm_floor_cycles"


@dataclasses.dataclass(frozen=True)
class CallEstimate:
    """The kernels of a call with their cycles, in order; `bound` names those that HBM bounds."""

    kernels: Mapping[str, float]
    bound: frozenset[str]

    @property
    def total(self) -> float:
        """Cycles of all kernels, which run one after the other."""
        return sum(self.kernels.values())


@dataclasses.dataclass(frozen=True)
class CallChart:
    """The estimates of a program of a case, by implementation and target."""

    case: str
    program: str
    targets: tuple[str, ...]
    contenders: tuple[Contender, ...]
    cells: Mapping[tuple[Contender, str], CallEstimate]


def build_call_charts(records: Sequence[Record]) -> tuple[CallChart, ...]:
    """Build the charts from records of the check `compiles`."""
    found: dict[tuple[str, str], dict[tuple[Contender, str], CallEstimate]] = {}
    for record in records:
        if (estimate := _parse_estimate(record)) is not None:
            place = (record.case, get_program(record))
            found.setdefault(place, {})[get_contender(record), get_target(record)] = estimate
    return choose_charts(found)


def choose_charts(
    found: Mapping[tuple[str, str], Mapping[tuple[Contender, str], CallEstimate]],
) -> tuple[CallChart, ...]:
    """Choose the programs that the most implementations have, the longest of these first.

    Args:
      found: by case and program, the estimates of contenders and targets.
    """
    charts = [
        CallChart(
            case,
            program,
            tuple(dict.fromkeys(target for _, target in cells)),
            tuple(dict.fromkeys(contender for contender, _ in cells)),
            cells,
        )
        for (case, program), cells in found.items()
    ]
    charts.sort(key=lambda chart: (-len(chart.contenders), -max(cell.total for cell in chart.cells.values())))
    return tuple(charts[:MAX_CHARTS])


def _parse_estimate(record: Record) -> CallEstimate | None:
    """Return the estimate of all kernels of a program.

    It is none if the cycles of one kernel are not known, for then the others say nothing.
    """
    kernels = [name.removesuffix(_BLOCK) for name in record.figures if name.endswith(_BLOCK)]
    if not kernels or any(kernel + _CALL not in record.figures for kernel in kernels):
        return None
    cycles = {kernel: record.figures[kernel + _CALL] for kernel in kernels}
    return CallEstimate(cycles, frozenset(k for k in kernels if cycles[k] <= record.figures.get(k + _FLOOR, 0.0)))
