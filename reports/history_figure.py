"""Draw the history of one contender over many runs, as SVG for the HTML page of a history.

The drawing has one column for each run. Its rows show the verdict, the largest error figure, the failures, the judged
records and the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from reports.conformity import CONFORMS, DOES_NOT_CONFORM, KNOWN_FAILURES, NOT_JUDGED
from reports.history_tracks import RunPoint, RunTrack, format_changed_briefly
from reports.svg_figure import BAD, BAND, GOOD, INK, KNOWN, LINE, MUTED, clip_share, render_svg
from reports.text_format import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_RUNS = 60
"""The most runs in a chart, which shows the newest. The columns of more runs could not be distinguished."""
_MAX_NAMES = 2
_MAX_LABELS = 24  # the most run numbers below the axis
_COLORS = {
    CONFORMS: GOOD,
    KNOWN_FAILURES: KNOWN,
    DOES_NOT_CONFORM: BAD,
    NOT_JUDGED: MUTED,
}
_MARKERS = {
    CONFORMS: "o",
    KNOWN_FAILURES: "s",
    DOES_NOT_CONFORM: "X",
    NOT_JUDGED: "d",
}
_ROWS = (0.45, 1.3, 0.8, 0.8, 0.8)


def render_history(track: RunTrack) -> Markup:
    """Render the newest runs of a contender as inline SVG, with one column for each run.

    A run of only a part of its level has hollow marks, and no line connects them to other runs.
    """
    points = track.points[-MAX_RUNS:]
    return render_svg(lambda: draw_history(points), label=f"{track.contender.label} in {len(points)} runs")


def draw_history(points: Sequence[RunPoint]) -> Figure:
    """Draw runs of one contender as a matplotlib figure, with one column for each run."""
    from matplotlib.figure import Figure  # imported late: importing matplotlib takes as long as judging a small case

    figure = Figure(figsize=(max(7.0, 1.6 + 0.2 * len(points)), 5.2), layout="constrained")
    figure.patch.set_alpha(0)
    rows = figure.subplots(5, 1, sharex=True, height_ratios=_ROWS)
    for axes, name in zip(rows, ("verdict", "largest,\nof its limit", "failures", "judged", "seconds"), strict=True):
        _draw_frame(axes, name, points)
    _draw_verdicts(rows[0], points)
    _draw_largest(rows[1], points)
    _draw_bars(rows[2], points, lambda point: (point.failures, point.errors), (BAD, INK), symlog=True)
    _draw_bars(rows[3], points, lambda point: (point.judged, point.unsupported + point.unjudged), (BAND, LINE))
    _draw_bars(rows[4], points, lambda point: (point.seconds,), (MUTED,))
    step = math.ceil(len(points) / _MAX_LABELS)
    shown = range(0, len(points), step)
    rows[-1].set_xticks(list(shown), [str(points[place].number) for place in shown])
    rows[-1].tick_params(axis="x", labelbottom=True)
    return figure


def _draw_frame(axes: Axes, name: str, points: Sequence[RunPoint]) -> None:
    axes.set_xlim(-0.7, len(points) - 0.3)
    axes.set_ylabel(name, color=INK, fontsize=9, rotation=0, ha="right", va="center")
    axes.patch.set_alpha(0)
    axes.spines[:].set_visible(False)
    axes.tick_params(axis="both", which="both", length=0, colors=MUTED, labelcolor=MUTED, labelsize=8)
    axes.grid(axis="y", color=LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    for place in _iter_changes(points):
        axes.axvline(place - 0.5, color=MUTED, linewidth=0.7, linestyle=(0, (2, 2)), zorder=0)


def _iter_changes(points: Sequence[RunPoint]) -> Iterator[int]:
    """Yield the column of each run that was judged under other conditions than the run before, except column 0."""
    yield from (place for place, point in enumerate(points) if place and point.changed)


def _draw_verdicts(axes: Axes, points: Sequence[RunPoint]) -> None:
    axes.set_yticks([])
    axes.set_ylim(-1, 1)
    for place, point in enumerate(points):
        _draw_mark(axes, place, 0, point, _MARKERS[point.conformity], _COLORS[point.conformity], size=7)
    for place in _iter_changes(points):
        names = [format_changed_briefly(changed) for changed in points[place].changed]
        more = f" +{len(names) - _MAX_NAMES}" if len(names) > _MAX_NAMES else ""
        text = f"{', '.join(names[:_MAX_NAMES])}{more}"
        axes.annotate(
            text,
            (place - 0.5, 1.1),
            rotation=90,
            ha="center",
            va="bottom",
            color=MUTED,
            fontsize=8,
            annotation_clip=False,
        )


def _draw_mark(axes: Axes, place: int, y: float, point: RunPoint, marker: str, colour: str, *, size: float) -> None:
    """Draw the mark of a run.

    The mark is hollow if only a part of the level was run. Such a mark is grey, unless its colour is that of a failure.
    """
    colour = colour if point.is_whole or colour == BAD else MUTED
    inside = colour if point.is_whole else "none"
    axes.plot([place], [y], marker=marker, markersize=size, mfc=inside, mec=colour, mew=1.1, linestyle="none", zorder=3)


def _draw_largest(axes: Axes, points: Sequence[RunPoint]) -> None:
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.axhline(1, color=BAD, linewidth=1.0, zorder=1)
    places = {place: clip_share(point.largest) for place, point in enumerate(points) if point.largest is not None}
    low, high = min([*places.values(), 0.5]), max([*places.values(), 2.0])
    axes.set_ylim(low / 1.6, high * 1.6)
    axes.yaxis.set_major_formatter(lambda tick, _: format_number(tick))
    for place, y in places.items():
        point, before = points[place], points[place - 1] if place else None
        if before is not None and place - 1 in places and _is_comparable(before, point):
            axes.plot([place - 1, place], [places[place - 1], y], color=MUTED, linewidth=1, zorder=2)
        _draw_mark(axes, place, y, point, "o", BAD if y > 1 else GOOD, size=5)


def _is_comparable(before: RunPoint, point: RunPoint) -> bool:
    """Return whether a line may connect the largest error figures of two runs.

    Both runs must be of the same whole level, with no run between them.
    """
    return before.is_whole and point.is_whole and before.level == point.level and before.number + 1 == point.number


def _draw_bars(
    axes: Axes,
    points: Sequence[RunPoint],
    parts: Callable[[RunPoint], Sequence[float]],
    colours: Sequence[str],
    *,
    symlog: bool = False,
) -> None:
    """Draw a stacked bar for each run; the bar is hollow if only a part of the level was run.

    Args:
      axes: the axes to draw on.
      points: the runs.
      parts: returns the heights of the parts of a run's bar, from the bottom.
      colours: the colour of each part.
      symlog: use a logarithmic scale above 1.
    """
    tallest = 0.0
    for place, point in enumerate(points):
        bottom = 0.0
        for height, colour in zip(parts(point), colours, strict=True):
            if height:
                inside = colour if point.is_whole else "none"
                axes.bar([place], [height], 0.62, bottom=bottom, facecolor=inside, edgecolor=colour, linewidth=0.9)
            bottom += height
        tallest = max(tallest, bottom)
    if symlog:
        axes.set_yscale("symlog", linthresh=1)
        axes.minorticks_off()
    axes.set_ylim(0, 1.15 * tallest if tallest else 1)
    axes.set_yticks([0, tallest] if tallest else [0])
    axes.yaxis.set_major_formatter(lambda tick, _: f"{tick:,.0f}" if tick >= 10 or not tick else format_number(tick))
