"""The environment that templates are rendered in: everything escaped, nothing undefined."""

from __future__ import annotations

import jinja2

from reports import text_format
from reports.error_map_figure import render_error_map

_FILTERS = (
    "brief",
    "duration",
    "figures",
    "metric_text",
    "number",
    "pattern_text",
    "rate",
    "share",
    "shorten",
    "size",
    "times",
    "value",
    "worst_text",
)


def create_environment() -> jinja2.Environment:
    """Templates of this package, with the wording that all reports share as filters."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("reports"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=False,
    )
    made.filters.update({name: getattr(text_format, name) for name in _FILTERS})
    made.filters["picture"] = render_error_map
    return made
