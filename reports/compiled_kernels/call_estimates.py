"""Build charts that compare the estimated TPU cycles of whole calls between implementations.

The estimates are figures of records of the check `compiles`. `choose_charts` also serves the charts of GPU kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from reports.record_groups import Contender, get_contender, get_program, get_target
from reports.records import Record

MAX_CHARTS = 4
"""The most charts on a page: calls that most implementations have come first, then calls with the most cycles."""
_BLOCK, _CALL, _FLOOR = ".full_block_cycles", ".call_cycles", ".hbm_floor_cycles"


@dataclasses.dataclass(frozen=True)
class CallEstimate:
    """A call's estimated cycles by kernel, in order, and the kernels that are `bound` by HBM traffic."""

    kernels: Mapping[str, float]
    bound: frozenset[str]

    @property
    def total(self) -> float:
        """The sum of the cycles of all kernels, since they run one after the other."""
        return sum(self.kernels.values())


@dataclasses.dataclass(frozen=True)
class CallChart:
    """The estimates of one program of one case, by implementation and by target (a TPU generation or a GPU)."""

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
    """Choose `MAX_CHARTS` programs that most implementations have, then those with the most estimated cycles."""
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
    """Return the estimated cycles of a record's program; None if the cycles of any kernel are unknown."""
    kernels = [name.removesuffix(_BLOCK) for name in record.figures if name.endswith(_BLOCK)]
    if not kernels or any(kernel + _CALL not in record.figures for kernel in kernels):
        return None
    cycles = {kernel: record.figures[kernel + _CALL] for kernel in kernels}
    return CallEstimate(cycles, frozenset(k for k in kernels if cycles[k] <= record.figures.get(k + _FLOOR, 0.0)))
