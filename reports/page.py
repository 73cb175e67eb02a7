"""The environment that templates are rendered in: everything escaped, nothing undefined."""

from __future__ import annotations

import jinja2

from reports import wording
from reports.picture import picture

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


def environment() -> jinja2.Environment:
    """Templates of this package, with the wording that all reports share as filters."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("reports"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=False,
    )
    made.filters.update({name: getattr(wording, name) for name in _FILTERS})
    made.filters["picture"] = picture
    return made
