"""Render a run as a small piece of HTML for a notebook: the verdict, the findings, and a chart.

It has its own styles and no script, so that it can stand in any page. Its colours suit a light and a dark background.
"""

from __future__ import annotations

from reports.causes.finding_text import choose_foremost
from reports.conformity import CONFORMITY_GLYPHS, CONFORMS, WRONG
from reports.limit_distances import build_distance_charts
from reports.page_model import Summary
from reports.records import ERROR, FAIL
from reports.template_environment import create_environment
from reports.text_format import GLYPHS

MAX_FINDINGS = 8
MAX_IMPLEMENTATIONS = 12
MAX_LINES = 9
"""Lines of a finding, beside its title and its command."""
MAX_LENGTH = 300
"""Characters of a line; those of a command are all shown, up to `MAX_COMMAND`."""
MAX_COMMAND = 600


def render_fragment(summary: Summary) -> str:
    """Render the summary of a run as HTML below 60 kB, whatever its records say."""
    shown, hidden, failures = choose_foremost(summary.findings, MAX_FINDINGS)
    return (
        create_environment()
        .get_template("fragment.html.j2")
        .render(
            summary=summary,
            findings=shown,
            hidden=hidden,
            hidden_failures=failures,
            charts=build_distance_charts(summary.groups),
            conformity_glyphs=CONFORMITY_GLYPHS,
            states={CONFORMS: "pass", **dict.fromkeys(WRONG, "fail")},
            glyphs=GLYPHS,
            red=(FAIL, ERROR),
            max_implementations=MAX_IMPLEMENTATIONS,
            max_lines=MAX_LINES,
            max_length=MAX_LENGTH,
            max_command=MAX_COMMAND,
        )
    )
