"""Estimated cycles of whole calls on TPUs, as the check `compiles` counted them: implementations side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from conformance.records import Record
from reports.compiled_section import CHECK
from reports.conformity import Contender, get_contender
from reports.ratio_figure import BAND, INK, LINE, MUTED, render_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_CHARTS = 4
"""Charts of a page: calls that the most implementations have, and of these the longest."""
_PART, _CALL, _FLOOR = ".full_block_cycles", ".call_cycles", ".hbm_floor_cycles"
_MAX_ABREAST = 5  # generations that there are


@dataclasses.dataclass(frozen=True)
class CallEstimate:
    """The kernels of a call with their cycles, in order, and which of them wait for HBM by their estimate."""

    kernels: Mapping[str, float]
    bound: frozenset[str]

    @property
    def total(self) -> float:
        """Cycles of all of them, which run one after the other."""
        return sum(self.kernels.values())


@dataclasses.dataclass(frozen=True)
class CallChart:
    """A program of a case: which generations it is compiled for, and what each implementation takes there."""

    case: str
    program: str
    targets: tuple[str, ...]
    contenders: tuple[Contender, ...]
    cells: Mapping[tuple[Contender, str], CallEstimate]

    @property
    def svg(self) -> str:
        """The chart."""
        return render_svg(lambda: draw_calls(self), label=f"Estimated kilocycles of {self.program} of {self.case}")


def build_call_charts(records: Sequence[Record]) -> tuple[CallChart, ...]:
    """What is drawn: the calls that the most implementations have, the longest of these first."""
    found: dict[tuple[str, str], dict[tuple[Contender, str], CallEstimate]] = {}
    for record in records:
        if record.check == CHECK and (estimate := _parse_estimate(record)) is not None:
            target, _, program = record.observable.partition(".")
            found.setdefault((record.case, program), {})[get_contender(record), target] = estimate
    return choose_charts(found)


def choose_charts(
    found: Mapping[tuple[str, str], Mapping[tuple[Contender, str], CallEstimate]],
) -> tuple[CallChart, ...]:
    """The programs of cases that the most implementations have, those that take longest first."""
    every = [
        CallChart(
            case,
            program,
            tuple(dict.fromkeys(target for _, target in cells)),
            tuple(dict.fromkeys(contender for contender, _ in cells)),
            cells,
        )
        for (case, program), cells in found.items()
    ]
    every.sort(key=lambda one: (-len(one.contenders), -max(cell.total for cell in one.cells.values())))
    return tuple(every[:MAX_CHARTS])


def _parse_estimate(record: Record) -> CallEstimate | None:
    """Of all kernels of a program; none if that of one is not known, for then the rest says nothing."""
    kernels = [name.removesuffix(_PART) for name in record.figures if name.endswith(_PART)]
    if not kernels or any(kernel + _CALL not in record.figures for kernel in kernels):
        return None
    cycles = {kernel: record.figures[kernel + _CALL] for kernel in kernels}
    return CallEstimate(cycles, frozenset(k for k in kernels if cycles[k] <= record.figures.get(k + _FLOOR, 0.0)))


def draw_calls(one: CallChart) -> Figure:
    """The chart as a figure of matplotlib's: a panel for each generation, a bar for each implementation."""
    from matplotlib.figure import Figure  # late: loading it takes as long as judging a small case

    across = min(len(one.targets), _MAX_ABREAST)
    figure = Figure(figsize=(1.6 + 1.75 * across, 0.6 + 0.3 * len(one.contenders)), layout="constrained")
    figure.patch.set_alpha(0)
    for position, target in enumerate(one.targets[:across]):
        axes = figure.add_subplot(1, across, position + 1)
        cells = [one.cells.get((contender, target)) for contender in one.contenders]
        longest = max((cell.total for cell in cells if cell is not None), default=1.0) / 1e3
        names = [contender.implementation for contender in one.contenders]
        _draw_frame(axes, target, names if position == 0 else [""] * len(names), longest)
        for y, cell in enumerate(cells):
            _draw_bar(axes, y, cell, longest)
    return figure


def _draw_frame(axes: Axes, target: str, names: Sequence[str], longest: float) -> None:
    axes.set_xlim(0, 1.45 * longest)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names)
    axes.set_xticks([0, longest], ["0", f"{longest:,.0f}"])
    axes.set_title(f"{target}, kilocycles", loc="left", color=INK, fontsize=9, fontweight="bold")
    axes.patch.set_alpha(0)
    axes.tick_params(axis="both", length=0, colors=MUTED, labelcolor=INK, labelsize=8)
    axes.spines[:].set_visible(False)


def _draw_bar(axes: Axes, y: int, cell: CallEstimate | None, longest: float) -> None:
    """The kernels of a call one after the other, with lines between them."""
    if cell is None:
        axes.annotate("not known", (0.03 * longest, y), va="center", color=MUTED, fontsize=8)
        return
    start = 0.0
    for cycles in cell.kernels.values():
        axes.barh([y], [cycles / 1e3], 0.6, left=start, facecolor=BAND, edgecolor=LINE, linewidth=1.2)
        start += cycles / 1e3
    text = f"{start:,.0f}{', HBM' if cell.bound else ''}"
    axes.annotate(text, (start + 0.03 * longest, y), va="center", color=INK, fontsize=8)
