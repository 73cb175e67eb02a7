"""Render a run as a small piece of HTML for a notebook: verdict, findings and matrix, without a script.

A notebook shows it inside its own page. So every style stands on an element, and colours come from the notebook.
"""

from __future__ import annotations

from reports.conformity import CONFORMITY_GLYPHS
from reports.matrices import build_matrices
from reports.page_model import Summary
from reports.template_environment import create_environment
from reports.terminal import MAX_LINES
from reports.text_format import GLYPHS

MAX_FINDINGS = 10


def render_fragment(summary: Summary, verdict: str, reason: str = "") -> str:
    """Render the fragment; all text is escaped.

    Args:
      summary: the content of the report.
      verdict: of the run as a whole, one of `reports.conformity`.
      reason: why the run has no verdict, or ended early; empty otherwise.
    """
    features, checks = build_matrices(summary.groups)
    template = create_environment().get_template("notebook.html.j2")
    return template.render(
        summary=summary,
        verdict=verdict,
        glyph=CONFORMITY_GLYPHS[verdict],
        reason=reason,
        findings=summary.findings[:MAX_FINDINGS],
        hidden=len(summary.findings[MAX_FINDINGS:]),
        matrices=(("by check", checks), ("by feature", features)),
        max_lines=MAX_LINES,
        glyphs=GLYPHS,
    )
