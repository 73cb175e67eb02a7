"""The parity report: one HTML file that needs nothing beside it, small because it aggregates and never lists passes."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from conformance import output_files
from conformance.bench.measurements import Measurement
from conformance.records import ERROR, EXPECTED_FAIL, FAIL, PASS, RED, UNEXPECTED_PASS, VERDICTS, Record, RunInfo
from reports import embedded, findings, matrices, measures, summary, wording
from reports.causes import roots, words
from reports.causes.finding import Finding, kind_of
from reports.compiled import compiled
from reports.detection import detection
from reports.figure import distribution_svg
from reports.kernels.bounds import bounds
from reports.kernels.calls import calls
from reports.kernels.schedules import schedules
from reports.page import environment
from reports.side_by_side import comparisons

FEW = 5
"""Records of each group of a finding that are there without the script."""
MOST_FAILURES = 200
"""Rows in the tables of expected failures: enough to see every pattern, few enough to open on a phone."""
MOST_ROWS = 200
MOST_NOTES = 50
CONTENTS = (
    ("findings", "Findings"),
    ("verdict", "Verdict"),
    ("features", "Implementations by feature"),
    ("checks", "Implementations by check"),
    ("records", "Records"),
    ("reasons", "Unsupported and unjudged"),
    ("ratios", "Distance to the limit"),
    ("gradients", "Gradients against both backwards"),
    ("discrimination", "Discrimination"),
    ("compiled", "Compiled for"),
    ("speed", "Speed and memory"),
    ("detection", "What this gate catches"),
    ("coverage", "Coverage"),
    ("tolerances", "Tolerances in force"),
    ("environment", "Environment"),
    ("cost", "Cost"),
)
RECORD_COLUMNS = (
    ("verdict", "verdict"),
    ("caseId", "case"),
    ("share", "of limit"),
    ("check", "check"),
    ("observable", "result"),
    ("contender", "implementation"),
)
"""Of the table of records, as the script calls them and as the reader sees them."""
STATES = {
    summary.CONFORMS: "pass",
    summary.KNOWN_FAILURES: "expected",
    summary.DOES_NOT_CONFORM: "fail",
    summary.NOT_JUDGED: "unjudged",
}
LEGEND = (
    ("pass", "passes, nothing red"),
    ("fail", "something is red"),
    ("expected", "only expected failures"),
    ("unsupported", "unsupported"),
    ("unjudged", "unjudged"),
)
LOUD = (PASS, FAIL, ERROR, UNEXPECTED_PASS)
"""Verdicts that a matrix cell shows in its first line."""
MARGIN_BUCKETS = tuple(
    words.replace("x", wording.TIMES)
    for words in ("below 1x", "1x to 10x", "10x to 100x", "100x to 1e4x", "1e4x or more")
)


@dataclasses.dataclass(frozen=True)
class FreeTable:
    """A list of dictionaries as a table: the union of their keys, and which columns hold only numbers."""

    columns: tuple[str, ...]
    rows: tuple[Mapping[str, Any], ...]
    numeric: frozenset[str]
    hidden: int


@dataclasses.dataclass(frozen=True)
class FindingPanel:
    """A finding as the page shows it: its place, its sentences, and its records by check and result."""

    number: int
    finding: Finding
    title: str
    facts: tuple[str, ...]
    groups: tuple[summary.FailureGroup, ...]


def render(
    records: Sequence[Record], run: RunInfo, measurements: Sequence[Measurement] = (), file: str = "*.jsonl"
) -> str:
    """The whole page as text; the same arguments always give the same text. `file` is where the records lie."""
    made = environment()
    assert made.loader is not None
    script, _, _ = made.loader.get_source(made, "report.js")
    # The policy of the page lets this script run and no other, whatever a record says.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    facts = {"script": Markup(script), "script_hash": f"sha256-{digest}"}
    return made.get_template("report.html.j2").render(_page(records, run, measurements, file) | facts)


def write(path: Path, records: Sequence[Record], run: RunInfo, measurements: Sequence[Measurement] = ()) -> None:
    """Write the page to `path`."""
    beside = path.with_suffix(".jsonl")
    file = shlex.quote(beside.name) if beside.exists() else "*.jsonl"
    output_files.write_text(path, render(records, run, measurements, file))


def free_table(rows: Sequence[Mapping[str, Any]], *, cap: int = MOST_ROWS) -> FreeTable:
    """Dictionaries as a table, columns in the order of first appearance."""
    columns = tuple(dict.fromkeys(str(column) for row in rows for column in row))
    numeric = frozenset(c for c in columns if all(isinstance(row.get(c, 0), int | float | None) for row in rows))
    return FreeTable(columns, tuple(rows[:cap]), numeric, max(0, len(rows) - cap))


def _page(records: Sequence[Record], run: RunInfo, measurements: Sequence[Measurement], file: str) -> dict[str, Any]:
    standings = summary.standings(records)
    panels = _findings(records, run)
    named = {label: " ".join(map(shlex.quote, names)) for label, names in run.files.items()}
    files = embedded.Files(file, named, run.runs)
    return {
        "run": run,
        "record_count": len(records),
        "total": summary.count(records),
        "standings": standings,
        "headline": _capital(wording.headline(standings, run)),
        "features": matrices.feature_matrix(records),
        "checks": matrices.check_matrix(records),
        "findings": panels,
        "data": embedded.data(records, [panel.finding.records for panel in panels], files),
        "cells": embedded.cells(records, files),
        "anchors": embedded.anchors(records),
        **_cases(records),
        "differ": findings.flags_differ(records),
        "expected": summary.failure_groups(records, verdicts={EXPECTED_FAIL}, cap=MOST_FAILURES),
        "margins": measures.margins(records),
        "gradients": measures.gradients(records),
        "cost": measures.cost(records),
        "compiled": compiled(records),
        "schedules": schedules(records),
        "calls": calls(records),
        "bounds": bounds(records),
        "comparisons": comparisons(measurements),
        "detection": detection(run.detection),
        "coverage": free_table(run.coverage),
        "tolerances": free_table(run.tolerances),
        **_reasons(records),
        **_distributions(records),
        **_vocabulary(),
    }


def _cases(records: Sequence[Record]) -> dict[str, Any]:
    cases, hidden = embedded.case_lines(records)
    return {"cases": cases, "cases_hidden": hidden, "addressed": {line.case for line in cases}}


def _findings(records: Sequence[Record], run: RunInfo) -> list[FindingPanel]:
    """Every finding with all of its records, of which each group shows a few."""
    panels = []
    for number, finding in enumerate(roots.of(records, run.probes), 1):
        groups = summary.failure_groups(finding.records, cap=len(finding.records))
        groups = [dataclasses.replace(group, shown=min(group.shown, FEW)) for group in groups]
        groups.sort(key=lambda group: kind_of(group.records[0]) != finding.kind)
        panels.append(FindingPanel(number, finding, words.title(finding), tuple(words.facts(finding)), tuple(groups)))
    return panels


def _reasons(records: Sequence[Record]) -> dict[str, Any]:
    reasons = summary.reason_groups(records)
    hidden = max(0, len(reasons) - MOST_ROWS)
    return {"reasons": reasons[:MOST_ROWS], "reasons_hidden": hidden, "left_out": summary.left_out(records)}


def _distributions(records: Sequence[Record]) -> dict[str, Any]:
    distributions = measures.distributions(records)
    return {
        "distributions": distributions[:MOST_ROWS],
        # Markup of our own making: matplotlib has escaped the names in it.
        "figure": Markup(distribution_svg(distributions)),
        "any_rms": any(d.max_rms_share is not None for d in distributions),
    }


def _vocabulary() -> dict[str, Any]:
    return {
        "verdicts": VERDICTS,
        "red": RED,
        "glyphs": wording.GLYPHS,
        "states": STATES,
        "legend": LEGEND,
        "contents": CONTENTS,
        "titles": dict(CONTENTS),
        "numbers": {anchor: number for number, (anchor, _) in enumerate(CONTENTS, 1)},
        "record_columns": RECORD_COLUMNS,
        "margin_buckets": MARGIN_BUCKETS,
        "most_notes": MOST_NOTES,
        "most_failures": MOST_FAILURES,
        "loud": LOUD,
        "metrics": summary.metrics,
        "over": lambda metric: summary.severity(metric.share) > 1,
        "severity": summary.severity,
        "standing_text": wording.standing_text,
        "left_out_text": wording.left_out_text,
        "evidence": words.evidence,
        "flags_differ_text": wording.flags_differ_text,
        "declared_text": wording.declared_text,
        "state_text": wording.state_text,
        "shortfall_text": wording.shortfall_text,
    }


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:] if text.startswith("could") else text
