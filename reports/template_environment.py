"""Create the Jinja environment that renders the HTML pages: all text is escaped, and undefined names are errors."""

from __future__ import annotations

import re

import jinja2
from markupsafe import Markup, escape

from reports import text_format
from reports.call_figure import render_call_chart
from reports.distance_figure import render_distances
from reports.error_map_figure import render_error_map
from reports.glossary import mark_terms
from reports.metrics import list_metrics


def mark_code(text: str) -> Markup:
    """Escape a text, and show what stands between backquotes in it as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


_FILTERS = {
    "call_chart": render_call_chart,
    "code": mark_code,
    "distances": render_distances,
    "duration": text_format.format_duration,
    "error_map": render_error_map,
    "factor": text_format.format_factor,
    "figures": text_format.format_figures,
    "mark_terms": mark_terms,
    "metric_text": text_format.format_metric,
    "metrics": list_metrics,
    "number": text_format.format_number,
    "pattern_text": text_format.format_pattern,
    "rate": text_format.format_rate,
    "share": text_format.format_share,
    "shorten": text_format.shorten_text,
    "size": text_format.format_size,
    "time": text_format.format_time,
    "value": text_format.format_value,
    "worst_text": text_format.format_worst,
}


def create_environment() -> jinja2.Environment:
    """Create a Jinja environment with this package's templates, and with the text formats of all reports as filters."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("reports"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=False,
    )
    environment.filters.update(_FILTERS)
    return environment
