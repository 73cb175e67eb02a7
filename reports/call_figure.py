"""Draw the estimated cycles of whole calls as bars: one panel per target chip, one bar per implementation.

A `CallChart` (`reports.compiled_kernels.call_estimates`) goes in, and inline SVG for the HTML page comes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from reports.compiled_kernels.call_estimates import CallChart, CallEstimate
from reports.svg_figure import BAND, INK, LINE, MUTED, render_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_PANELS = 5


def render_call_chart(chart: CallChart) -> Markup:
    """Render a chart of estimated cycles as inline SVG."""
    label = f"Estimated kilocycles of {chart.program} of {chart.case}"
    return render_svg(lambda: draw_calls(chart), label=label)


def draw_calls(chart: CallChart) -> Figure:
    """Draw a chart of estimated cycles as a matplotlib figure."""
    from matplotlib.figure import Figure  # imported late: importing matplotlib takes as long as judging a small case

    across = min(len(chart.targets), _MAX_PANELS)
    figure = Figure(figsize=(1.6 + 1.75 * across, 0.6 + 0.3 * len(chart.implementations)), layout="constrained")
    figure.patch.set_alpha(0)
    for position, target in enumerate(chart.targets[:across]):
        axes = figure.add_subplot(1, across, position + 1)
        cells = [chart.cells.get((implementation, target)) for implementation in chart.implementations]
        longest = max((cell.total for cell in cells if cell is not None), default=1.0) / 1e3
        names = [implementation.name for implementation in chart.implementations]
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
    """Draw the bar of one call, with one segment for each kernel that the call runs."""
    if cell is None:
        axes.annotate("not known", (0.03 * longest, y), va="center", color=MUTED, fontsize=8)
        return
    start = 0.0
    for cycles in cell.kernels.values():
        axes.barh([y], [cycles / 1e3], 0.6, left=start, facecolor=BAND, edgecolor=LINE, linewidth=1.2)
        start += cycles / 1e3
    text = f"{start:,.0f}{', HBM' if cell.bound else ''}"
    axes.annotate(text, (start + 0.03 * longest, y), va="center", color=INK, fontsize=8)
