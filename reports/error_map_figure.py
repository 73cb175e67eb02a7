"""Draw where a result is wrong, as SVG for the HTML page.

An `ErrorMap` (`reports.records`) goes in: the largest error in each cell of a coarse grid over the result. One
drawing shades these cells by their error relative to the limit. Another shades the pairs that the mask allows.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from markupsafe import Markup

from reports.records import ErrorMap
from reports.text_format import TIMES

_CELL = 10
_LONG_SIDE = 240  # the intended length of an axis in pixels; a cell's side stays between _CELL and _MAX_CELL
_MAX_CELL = 24
_LEFT, _TOP = 46, 18
_AXIS_NAMES = {
    "T": "queries",
    "S": "keys",
    "L": "entries",
    "H": "columns",
    "V": "columns",
    "BN": "batch rows and heads",
    "BK": "batch rows and key/value heads",
}
# For each cell character of `reports.records`: a colour variable of the page, and its opacity.
_SHADES = {
    "-": ("--line", 0.55),
    "0": ("--pass-ink", 0.16),
    "1": ("--pass-ink", 0.34),
    "2": ("--fail-ink", 0.3),
    "3": ("--fail-ink", 0.42),
    "4": ("--fail-ink", 0.54),
    "5": ("--fail-ink", 0.66),
    "6": ("--fail-ink", 0.78),
    "7": ("--fail-ink", 0.9),
    "8": ("--fail-ink", 1.0),
    "9": ("--ink", 0.9),
}
_BEYOND_LIMIT = "2345678"
_SHADE_TEXT = {
    "-": "not judged",
    "0": "below a tenth of the limit",
    "1": "within the limit",
    **{shade: f"up to {10 ** (int(shade) - 1):,}{TIMES} over it" for shade in _BEYOND_LIMIT[:-1]},
    "8": f"more than 1,000,000{TIMES} over it",
    "9": "NaN or infinite",
}


def render_error_map(error_map: ErrorMap, level: int = 4) -> Markup:
    """Render the drawings of an error map side by side, and a legend of their shades."""
    panels = [_render_mask(error_map, level)] if error_map.mask and error_map.marks else []
    panels.append(_render_cells(error_map, level))
    used = set("".join((*error_map.cells, error_map.marks)))
    caption = "".join(f"<span>{_render_swatch(shade)}{html.escape(text)}</span>" for shade, text in _build_legend(used))
    if panels[1:]:
        caption += f"<span>{_render_swatch('')}hidden by the mask</span>"
    names = ("queries", "keys")
    blocks = [f"every {block:,} {name}" for block, name in zip(error_map.blocks, names, strict=True) if block]
    if blocks:
        caption += f"<span>dashed: {', '.join(blocks)}</span>"
    return Markup(f'<figure><div class="panels">{"".join(panels)}</div><figcaption>{caption}</figcaption></figure>')


def _build_legend(used: Iterable[str]) -> list[tuple[str, str]]:
    """Return the legend's shades and meanings: all that occur, but beyond the limit only the palest and the darkest."""
    red = [shade for shade in _BEYOND_LIMIT if shade in used]
    return [(shade, text) for shade, text in _SHADE_TEXT.items() if shade in used and shade not in red[1:-1]]


def _render_mask(error_map: ErrorMap, level: int) -> str:
    """Render the pairs of query and key that the mask allows, shaded by the error of their query or of their key."""
    by_key = error_map.along == "S"
    marks = error_map.marks
    lines = [
        "".join(" " if pair == "0" else marks[x if by_key else y :][:1] or "-" for x, pair in enumerate(line))
        for y, line in enumerate(error_map.mask)
    ]
    by = "key" if by_key else "query"
    title = f"Batch row {error_map.at[0]}, head {error_map.at[1]}: who attends to whom, each {by} shaded by its error"
    return _render_panel(title, lines, ("T", "S"), error_map.mask_shape, error_map.blocks, level)


def _render_cells(error_map: ErrorMap, level: int) -> str:
    first, second = (_AXIS_NAMES.get(axis, axis) for axis in error_map.axes)
    sizes = dict(zip("TS", error_map.blocks, strict=True))
    blocks = sizes.get(error_map.axes[0], 0), sizes.get(error_map.axes[1], 0)
    title = f"The largest error by {first} and {second}"
    return _render_panel(title, error_map.cells, error_map.axes, error_map.shape, blocks, level)


def _render_panel(
    title: str,
    lines: Sequence[str],
    axes: tuple[str, str],
    shape: tuple[int, int],
    blocks: tuple[int, int],
    level: int,
) -> str:
    """Render one drawing with its heading and the names of its axes.

    Args:
      axes: names of the vertical and the horizontal axis.
      shape: how many elements each axis has.
      blocks: how many elements a block has along each axis; 0 where that is not known.
    """
    columns = max(map(len, lines), default=0)
    if not lines or not columns:
        return ""
    across, down = (min(_MAX_CELL, max(_CELL, _LONG_SIDE // count)) for count in (columns, len(lines)))
    width, height = across * columns, down * len(lines)
    paths = _render_paths(lines, across, down)
    paths += f'<path d="M0 0h{width}v{height}h-{width}z" fill="none" stroke="var(--muted)" stroke-width="1"/>'
    paths += _render_block_borders(shape, blocks, width, height)
    names = [
        html.escape(_AXIS_NAMES.get(axis, axis) + (f" 0 to {count - 1:,}" if count > 1 else ": 1"))
        for axis, count in zip(axes, shape, strict=True)
    ]
    texts = f'<text x="0" y="-6">{names[1]}</text>'
    texts += f'<text x="0" y="-6" transform="rotate(-90)" text-anchor="end">{names[0]}</text>'
    room = max(width, 9 * len(names[1])), max(height, 7 * len(names[0]))
    box = f"{-_LEFT // 2} {-_TOP} {room[0] + _LEFT // 2 + 2} {room[1] + _TOP + 2}"
    size = f'width="{room[0] + _LEFT // 2 + 2}" height="{room[1] + _TOP + 2}"'
    label = html.escape(title)
    return (
        f"<div><h{level}>{label}</h{level}>"
        f'<svg role="img" aria-label="{label}" viewBox="{box}" {size}>{paths}{texts}</svg></div>'
    )


def _render_paths(lines: Sequence[str], across: int, down: int) -> str:
    """Render one SVG path for each shade. Adjacent equal cells of a row are drawn as one rectangle."""
    runs: dict[str, list[str]] = {}
    for y, line in enumerate(lines):
        start = 0
        for x in range(1, len(line) + 1):
            if x == len(line) or line[x] != line[start]:
                wide = (x - start) * across
                runs.setdefault(line[start], []).append(f"M{start * across} {y * down}h{wide}v{down}h-{wide}z")
                start = x
    return "".join(_render_filled(shade, "".join(found)) for shade, found in sorted(runs.items()) if shade in _SHADES)


def _render_filled(shade: str, path: str) -> str:
    colour, opacity = _SHADES[shade]
    return f'<path fill="var({colour})" fill-opacity="{opacity:g}" d="{path}"/>'


def _render_block_borders(shape: tuple[int, int], blocks: tuple[int, int], width: int, height: int) -> str:
    """Render dashed lines between blocks, unless there are too many blocks to distinguish."""
    path = ""
    for axis, (count, block) in enumerate(zip(shape, blocks, strict=True)):
        if not block or not 1 < -(-count // block) <= _MAX_CELL:
            continue
        for place in range(block, count, block):
            if axis == 0:
                path += f"M0 {round(place / count * height, 1):g}h{width}"
            else:
                path += f"M{round(place / count * width, 1):g} 0v{height}"
    return f'<path d="{path}" fill="none" stroke="var(--ink)" stroke-dasharray="3 2"/>' if path else ""


def _render_swatch(shade: str) -> str:
    """Render the square that shows a shade in the legend; the square is empty if `shade` is empty."""
    fill = _render_filled(shade, "M0 0h12v12h-12z") if shade else ""
    frame = '<path d="M.5 .5h11v11h-11z" fill="none" stroke="var(--muted)"/>'
    return f'<svg width="12" height="12" viewBox="0 0 12 12" aria-hidden="true">{fill}{frame}</svg>'
