"""Draw how far each check stays from its limits: a mark for each dtype on a log axis, and the limit as a line."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator

from markupsafe import Markup

from reports.limit_distances import DistanceChart, DistanceRow
from reports.metrics import Metric, rank_share
from reports.records import FAIL
from reports.text_format import GLYPHS, TIMES, format_count, format_multiple, format_number, format_share, shorten_text

LEAST, MOST = 1e-2, 1e2
"""The ends of the axis, the same on every chart: the limit is in the middle. What is beyond is drawn at the edge."""
_ROW, _TOP, _PLOT, _RIGHT = 15, 18, 164, 108  # pixels: a row, the axis, the plot, the figure beside a row
_NAME_WIDTHS = {"check": 98, "implementation": 230}
_MAX_NAME = {"check": 16, "implementation": 38}  # characters
_SHAPES = {
    "f32": "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0z",
    "bf16": "M-3 -3h6v6h-6z",
    "f16": "M0 -4.4l4.4 4.4l-4.4 4.4l-4.4 -4.4z",
}
"""A mark for each dtype, so that colour is not needed to tell them apart."""
_OTHER_SHAPE = "M-3.8 3.2h7.6l-3.8 -6.8z"


def render_distances(chart: DistanceChart) -> Markup:
    """Render a chart as a figure with a legend; `describe_distances` says in words what it shows."""
    names = _NAME_WIDTHS[chart.noun]
    width, height = names + _PLOT + _RIGHT, _TOP + _ROW * len(chart.rows) + 4
    parts = [
        f'<rect x="{_locate(1) + names:g}" y="{_TOP}" width="{_PLOT - _locate(1):g}" height="{_ROW * len(chart.rows)}" '
        'fill="var(--fail-ink)" fill-opacity=".09"/>',
        *_render_axis(names, height),
        *(part for place, row in enumerate(chart.rows) for part in _render_row(row, chart, names, place)),
    ]
    label = html.escape(f"{chart.title}: {describe_distances(chart)}")
    legend = "".join(
        f"<span>{_render_swatch(dtype)}{html.escape(dtype or 'no dtype')}</span>" for dtype in chart.dtypes
    )
    return Markup(
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"{''.join(parts)}</svg>"
        f'<div class="keys">{legend}<span>red line: the limit</span></div>'
    )


def describe_distances(chart: DistanceChart) -> str:
    """Describe a chart in one sentence: how many rows are beyond a limit, and which is the largest."""
    beyond = sum(row.worst is not None and row.worst.is_over for row in chart.rows)
    places = [(metric, row.name, dtype) for row in chart.rows for dtype, metric in row.by_dtype.items()]
    text = f"{beyond:,} of {format_count(len(chart.rows), chart.noun)} beyond a limit"
    if places:
        metric, name, dtype = max(places, key=lambda place: rank_share(place[0].share))
        place = " ".join(filter(None, (name, dtype)))
        text += f"; the largest figure is {format_multiple(metric.share)} its limit, in {place}"
    without = sum(row.red_without_figure for row in chart.rows)
    return f"{text}; {format_count(without, 'red record')} without a figure" if without else text


def format_row_figure(row: DistanceRow) -> str:
    """Format the figure beside a row: the largest share of a limit, with a sign if the row is red."""
    sign = f"{GLYPHS[FAIL]} " if row.red else ""
    if row.worst is None:
        return f"{sign}no figure"
    return f"{sign}{format_share(row.worst.share)}{' rms' if row.worst.name == 'rms' else ''}"


def _locate(share: float) -> float:
    """Return the place of a share on the axis, in pixels from its left end."""
    clipped = min(max(share, LEAST), MOST)
    return round(_PLOT * math.log(clipped / LEAST) / math.log(MOST / LEAST), 1)


def _render_axis(names: int, height: int) -> Iterator[str]:
    """Yield a line and a label for each power of ten. The line of the limit has the colour of failures."""
    tick = LEAST
    while tick <= MOST * 1.01:
        x = names + _locate(tick)
        is_limit = math.isclose(tick, 1)
        line = 'stroke="var(--fail-ink)" stroke-width="1.5"' if is_limit else 'stroke="var(--line)"'
        yield f'<path d="M{x:g} {_TOP - 3}V{height - 4}" {line}/>'
        text = "limit" if is_limit else f"{format_number(tick)}{TIMES}"
        yield f'<text x="{x:g}" y="{_TOP - 7}" text-anchor="middle" fill="var(--muted)">{text}</text>'
        tick *= 10


def _render_row(row: DistanceRow, chart: DistanceChart, names: int, place: int) -> Iterator[str]:
    y = _TOP + _ROW * place + _ROW / 2
    name = row.name if len(row.name) <= (most := _MAX_NAME[chart.noun]) else f"{row.name[: most - 1]}…"
    yield f'<text x="{names - 10}" y="{y + 4:g}" text-anchor="end" fill="var(--ink)">{html.escape(name)}</text>'
    shares = [rank_share(metric.share) for metric in row.by_dtype.values()]
    if shares:
        left, right = names + _locate(min(shares)), names + _locate(max(shares))
        yield f'<path d="M{left:g} {y:g}H{right:g}" stroke="var(--muted)" stroke-opacity=".6"/>'
    for dtype in chart.dtypes:
        if metric := row.by_dtype.get(dtype):
            yield _render_mark(metric, dtype, row.name, names, y)
    colour = "--fail-ink" if row.red else "--muted"
    weight = ' font-weight="600"' if row.red else ""
    text = f'<text x="{names + _PLOT + 8}" y="{y + 4:g}" fill="var({colour})"{weight}>'
    yield f"{text}{html.escape(format_row_figure(row))}</text>"


def _render_mark(metric: Metric, dtype: str, name: str, names: int, y: float) -> str:
    colour = "--fail-ink" if metric.is_over else "--ink"
    place = f"translate({names + _locate(rank_share(metric.share)):g} {y:g})"
    words = html.escape(
        shorten_text(f"{name}, {dtype or 'no dtype'}: {format_multiple(metric.share)} its limit", longest=90)
    )
    shape = _SHAPES.get(dtype, _OTHER_SHAPE)
    return f'<path d="{shape}" transform="{place}" fill="var({colour})"><title>{words}</title></path>'


def _render_swatch(dtype: str) -> str:
    shape = _SHAPES.get(dtype, _OTHER_SHAPE)
    return (
        '<svg width="10" height="10" viewBox="-5 -5 10 10" aria-hidden="true">'
        f'<path d="{shape}" fill="var(--ink)"/></svg>'
    )
