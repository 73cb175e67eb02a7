"""The figure of the report: how far from the limit each observable stays, as inline SVG in the page's colours."""

from __future__ import annotations

import html
import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from reports.conformity import rank_share
from reports.measures import Distribution, rank_dtype, rank_observable
from reports.text_format import number, share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, LINE, BAND, GOOD, BAD, KNOWN = (f"#01020{digit}" for digit in range(3, 10))
"""Stand-ins that become the page's custom properties, so that one drawing serves light and dark."""
VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    LINE: "--line",
    BAND: "--band",
    GOOD: "--pass-ink",
    BAD: "--fail-ink",
    KNOWN: "--warn-ink",
}
FLOOR, CEILING = 1e-5, 1e4
"""Shares beyond these are drawn at the edge: exact zeros and infinities have no place on a log axis."""
MAX_ROWS, MAX_PANELS, PANELS_ABREAST = 24, 8, 3


def render_distributions(distributions: Sequence[Distribution]) -> str:
    """Panels by dtype, rows by observable; empty without distributions. Deterministic, without any address in it."""
    if not distributions:
        return ""
    dtypes = sorted({d.dtype for d in distributions}, key=rank_dtype)[:MAX_PANELS]
    rows = _choose_rows(distributions)
    label = f"Value over limit by observable, for {', '.join(dtypes)}"
    return render_svg(lambda: _draw_distributions(distributions, dtypes, rows), label=label)


def render_svg(draw: Callable[[], Figure], *, label: str) -> str:
    """What `draw` draws as inline SVG in the page's colours; drawn twice, it is the same text."""
    import matplotlib  # imported late: loading it takes as long as judging a small case, and few runs write a page

    # Names come from records: no dollar sign in them may be read as mathematics, no odd letter may warn.
    settings: Any = {"svg.hashsalt": "attention-conformance", "svg.fonttype": "none", "text.parse_math": False}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figure = draw()
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return _inline_svg(buffer.getvalue(), label=label)


def _choose_rows(distributions: Sequence[Distribution]) -> list[str]:
    worst: dict[str, float] = {}
    for d in distributions:
        worst[d.observable] = max(worst.get(d.observable, -1.0), rank_share(d.spread.most))
    kept = sorted(worst, key=lambda name: (-worst[name], name))[:MAX_ROWS]
    return sorted(kept, key=rank_observable)


def _draw_distributions(distributions: Sequence[Distribution], dtypes: Sequence[str], rows: Sequence[str]) -> Figure:
    from matplotlib.figure import Figure  # late, as above

    across = min(len(dtypes), PANELS_ABREAST)
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
    axes.xaxis.set_major_formatter(lambda tick, _: number(tick))
    axes.set_title(title, loc="left", color=INK, fontsize=10, fontweight="bold")
    axes.axvline(1, color=BAD, linewidth=1.2, zorder=1)
    axes.patch.set_alpha(0)
    axes.tick_params(axis="both", length=0, colors=MUTED, labelcolor=INK, labelsize=9)
    axes.grid(axis="x", color=LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)


def _draw_bar(axes: Axes, y: int, distribution: Distribution) -> None:
    s = distribution.spread
    axes.hlines(y, _clip_share(s.least), _clip_share(s.most), colors=MUTED, linewidth=1)
    axes.hlines(y, _clip_share(s.p05), _clip_share(s.p95), colors=BAND, linewidth=7)
    axes.plot([_clip_share(s.median)], [y], marker="|", markersize=9, markeredgewidth=1.6, color=INK)
    over = rank_share(s.most) > 1
    axes.plot([_clip_share(s.most)], [y], marker="X" if over else "o", markersize=6, color=BAD if over else GOOD, mew=0)
    if distribution.max_rms_share is not None:
        axes.plot(
            [_clip_share(distribution.max_rms_share)], [y], marker="D", markersize=4, mfc="none", color=INK, mew=0.9
        )
    axes.annotate(
        share(s.most),
        (1.0, y),
        xycoords=("axes fraction", "data"),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        color=BAD if over else MUTED,
        fontsize=8,
        annotation_clip=False,
    )


def _clip_share(value: float) -> float:
    return min(max(rank_share(value), FLOOR), CEILING)


def _inline_svg(svg: str, *, label: str) -> str:
    svg = svg[svg.index("<svg") :]
    for block in (r"<metadata>.*?</metadata>", r"<style[^>]*>.*?</style>", r"<!--.*?-->", r"<defs>\s*</defs>"):
        svg = re.sub(block, "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    referenced = set(re.findall(r"#([\w-]+)", svg))
    svg = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in referenced else "", svg)
    for stand_in, variable in VARIABLES.items():
        svg = svg.replace(stand_in, f"var({variable})")
    svg = re.sub(r"font: (?:bold |700 )?([\d.]+)px [^;\"]*", _replace_font, svg)
    width, height = (float(found) for found in re.findall(r'(?:width|height)="([\d.]+)pt"', svg)[:2])
    style = f"width: {width * 4 / 3:.0f}px; height: {height * 4 / 3:.0f}px"
    size = f'role="img" aria-label="{html.escape(label)}" style="{style}"'
    return re.sub(r'^<svg[^>]*?viewBox="([^"]*)"[^>]*>', lambda m: f'<svg {size} viewBox="{m[1]}">', svg).strip()


def _replace_font(found: re.Match[str]) -> str:
    weight = "font-weight: 700; " if "bold" in found[0] or "700" in found[0] else ""
    return f"{weight}font-size: {found[1]}px"
