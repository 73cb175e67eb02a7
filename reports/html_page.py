"""Render the HTML page of a run from its model (`reports.page_model`), as one file that loads nothing else.

The page stays small because it shows aggregates. Passing records are only in the data for its script, up to a limit.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from reports import output_files
from reports.conformity import CONFORMITY_GLYPHS, CONFORMS, DOES_NOT_CONFORM, IN_PART, KNOWN_FAILURES, NOT_JUDGED
from reports.page_model import Page, Summary, build_page
from reports.ratio_figure import render_distributions
from reports.record_query import build_query_command
from reports.record_table import serialize_records
from reports.records import ERROR, FAIL, PASS, RED, UNEXPECTED_PASS, VERDICTS
from reports.records.measurement import Measurement
from reports.template_environment import create_environment
from reports.text_format import GLYPHS, TIMES

MAX_NOTES = 50
MAX_ROWS = 200
SECTIONS = {
    "findings": "Findings",
    "verdict": "Verdict",
    "features": "Results by feature",
    "checks": "Results by check",
    "records": "Records",
    "figures": "Errors and limits",
    "accelerators": "Accelerators and speed",
    "run": "About this run",
}
"""The titles of the page's sections, in order, by their HTML anchors."""
PARTS = {
    "reasons": "Unsupported and unjudged",
    "ratios": "Distance to the limits",
    "gradients": "Gradients against two backward passes",
    "discrimination": "Strength of the cases",
    "tolerances": "Limits",
    "compiled": "Compiled for accelerators",
    "speed": "Speed and memory",
    "detection": "Which planted bugs the checks find",
    "coverage": "Coverage",
    "environment": "Environment",
    "cost": "Cost",
    "words": "Checks and terms",
}
"""The titles of the parts of sections that the page folds, by their HTML anchors."""
MAX_DECLINED = 6
"""The most implementations whose declined cases the top of the page counts."""
RECORD_COLUMNS = (
    ("verdict", "verdict"),
    ("caseId", "case"),
    ("share", "of limit"),
    ("check", "check"),
    ("observable", "result"),
    ("implementation", "implementation"),
)
"""The columns of the table of records: the name in the page's script, and the heading."""
_STATES = {
    CONFORMS: "pass",
    KNOWN_FAILURES: "expected",
    IN_PART: "fail",
    DOES_NOT_CONFORM: "fail",
    NOT_JUDGED: "unjudged",
}
"""The CSS class that colours each verdict on an implementation."""
LEGEND = (
    ("pass", "passes, nothing red"),
    ("fail", "something is red"),
    ("expected", "only expected failures"),
    ("unsupported", "unsupported"),
    ("unjudged", "unjudged"),
)
PROMINENT_VERDICTS = (PASS, FAIL, ERROR, UNEXPECTED_PASS)
"""Verdicts that a matrix cell shows in its first line."""
MARGIN_BUCKETS = tuple(
    text.replace("x", TIMES) for text in ("below 1x", "1x to 10x", "10x to 100x", "100x to 1e4x", "1e4x or more")
)


def save_page(path: Path, summary: Summary, measurements: Sequence[Measurement] = ()) -> None:
    """Write the HTML page of a run. Its commands read the `.jsonl` of the same name, or `*.jsonl` if there is none."""
    beside = path.with_suffix(".jsonl")
    file = shlex.quote(beside.name) if beside.exists() else "*.jsonl"
    output_files.write_text(path, render_page(build_page(summary, measurements, file)))


def render_page(page: Page) -> str:
    """Render the page as HTML text. The same model always gives the same text."""
    environment = create_environment()
    assert environment.loader is not None
    script, _, _ = environment.loader.get_source(environment, "report.js")
    # The page's content security policy allows only the script with this hash: text in a record can never run.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = environment.get_template("report.html.j2")
    return template.render(
        page=page,
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        data=serialize_records(page),
        figure=render_distributions(page.measures.distributions),
        build_query_command=build_query_command,
        **_list_constants(),
    )


def _list_constants() -> dict[str, Any]:
    return {
        "verdicts": VERDICTS,
        "red": RED,
        "glyphs": GLYPHS,
        "conformity_glyphs": CONFORMITY_GLYPHS,
        "states": _STATES,
        "legend": LEGEND,
        "sections": SECTIONS,
        "parts": PARTS,
        "max_declined": MAX_DECLINED,
        "numbers": {anchor: number for number, anchor in enumerate(SECTIONS, 1)},
        "record_columns": RECORD_COLUMNS,
        "margin_buckets": MARGIN_BUCKETS,
        "max_notes": MAX_NOTES,
        "max_rows": MAX_ROWS,
        "prominent": PROMINENT_VERDICTS,
    }
