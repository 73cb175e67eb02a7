"""Draw the spread of error ratios relative to their limits, as SVG for the HTML page.

There is one panel for each dtype, and in it one row for each observable (a judged result, such as `out` or `dq`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from reports.measures import Distribution, rank_dtype, rank_observable
from reports.metrics import rank_share
from reports.svg_figure import BAD, BAND, CEILING, FLOOR, GOOD, INK, LINE, MUTED, clip_share, render_svg
from reports.text_format import format_number, format_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_ROWS, MAX_PANELS, MAX_PANELS_ABREAST = 24, 8, 3


def render_distributions(distributions: Sequence[Distribution]) -> Markup:
    """Render the spread of error ratios as inline SVG, with a panel for each dtype; empty without distributions."""
    if not distributions:
        return Markup()
    dtypes = sorted({d.dtype for d in distributions}, key=rank_dtype)[:MAX_PANELS]
    rows = _choose_rows(distributions)
    label = f"Value over limit by observable, for {', '.join(dtypes)}"
    return render_svg(lambda: _draw_distributions(distributions, dtypes, rows), label=label)


def _choose_rows(distributions: Sequence[Distribution]) -> list[str]:
    """Choose the observables whose errors are the largest shares of their limits, and return them in reading order."""
    worst: dict[str, float] = {}
    for d in distributions:
        worst[d.observable] = max(worst.get(d.observable, -1.0), rank_share(d.spread.most))
    kept = sorted(worst, key=lambda name: (-worst[name], name))[:MAX_ROWS]
    return sorted(kept, key=rank_observable)


def _draw_distributions(distributions: Sequence[Distribution], dtypes: Sequence[str], rows: Sequence[str]) -> Figure:
    from matplotlib.figure import Figure  # imported late: importing matplotlib takes as long as judging a small case

    across = min(len(dtypes), MAX_PANELS_ABREAST)
    down = math.ceil(len(dtypes) / across)
    height = 0.26 * len(rows) + 0.75
    figure = Figure(figsize=(1.3 + 3.6 * across, height * down), layout="constrained")
    figure.patch.set_alpha(0)
    found = {(d.dtype, d.observable): d for d in distributions}
    lowest = min(max(FLOOR, min(rank_share(d.spread.least) for d in distributions)), 0.5)
    highest = max(min(CEILING, max(rank_share(d.spread.most) for d in distributions)), 2.0)
    for position, dtype in enumerate(dtypes):
        axes = figure.add_subplot(down, across, position + 1)
        _draw_frame(axes, dtype or "no dtype", rows, low=lowest, high=highest, labelled=position % across == 0)
        for y, observable in enumerate(rows):
            if distribution := found.get((dtype, observable)):
                _draw_bar(axes, y, distribution)
    return figure


def _draw_frame(axes: Axes, title: str, rows: Sequence[str], *, low: float, high: float, labelled: bool) -> None:
    axes.set_xscale("log")
    axes.set_xlim(low / 2, high * 2)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), rows if labelled else [""] * len(rows))
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda tick, _: format_number(tick))
    axes.set_title(title, loc="left", color=INK, fontsize=10, fontweight="bold")
    axes.axvline(1, color=BAD, linewidth=1.2, zorder=1)
    axes.patch.set_alpha(0)
    axes.tick_params(axis="both", length=0, colors=MUTED, labelcolor=INK, labelsize=9)
    axes.grid(axis="x", color=LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)


def _draw_bar(axes: Axes, y: int, distribution: Distribution) -> None:
    s = distribution.spread
    axes.hlines(y, clip_share(s.least), clip_share(s.most), colors=MUTED, linewidth=1)
    axes.hlines(y, clip_share(s.p05), clip_share(s.p95), colors=BAND, linewidth=7)
    axes.plot([clip_share(s.median)], [y], marker="|", markersize=9, markeredgewidth=1.6, color=INK)
    over = s.is_over
    axes.plot([clip_share(s.most)], [y], marker="X" if over else "o", markersize=6, color=BAD if over else GOOD, mew=0)
    if distribution.max_rms_share is not None:
        place = clip_share(distribution.max_rms_share)
        axes.plot([place], [y], marker="D", markersize=4, mfc="none", color=INK, mew=0.9)
    axes.annotate(
        format_share(s.most),
        (1.0, y),
        xycoords=("axes fraction", "data"),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        color=BAD if over else MUTED,
        fontsize=8,
        annotation_clip=False,
    )
