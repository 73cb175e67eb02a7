"""Render matplotlib figures as inline SVG in the colours of the page."""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from reports.metrics import rank_share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, LINE, BAND, GOOD, BAD = (f"#01020{digit}" for digit in range(3, 9))
"""Placeholder colours, which become CSS variables of the page, so that one drawing serves light and dark mode."""
VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    LINE: "--line",
    BAND: "--band",
    GOOD: "--pass-ink",
    BAD: "--fail-ink",
}
FLOOR, CEILING = 1e-5, 1e4
"""The range of shares on an axis. Others are drawn at its edge, since a log axis has no place for 0 and infinity."""


def render_svg(draw: Callable[[], Figure], *, label: str) -> Markup:
    """Render the figure of `draw` as reproducible inline SVG. Matplotlib escapes its text, so it is safe in a page."""
    import matplotlib  # imported late: it takes as long as judging a small case, and few runs write a page

    # Names come from records: a dollar sign must not be read as mathematics, and an unusual letter must not warn.
    settings: Any = {"svg.hashsalt": "attention-conformance", "svg.fonttype": "none", "text.parse_math": False}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figure = draw()
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return Markup(_inline_svg(buffer.getvalue(), label=label))


def clip_share(share: float | None) -> float:
    """Clip a share of a limit to the range that an axis shows, `FLOOR` to `CEILING`."""
    return min(max(rank_share(share), FLOOR), CEILING)


def _inline_svg(svg: str, *, label: str) -> str:
    """Turn an SVG file into an inline drawing in the page's colours."""
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
