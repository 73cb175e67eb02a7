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
from conformance.measurements import Measurement
from conformance.records import ERROR, EXPECTED_FAIL, FAIL, PASS, RED, UNEXPECTED_PASS, VERDICTS, Record, RunInfo
from reports import conformity, matrices, measures, record_table, shared_evidence, text_format
from reports.causes import finding_text, root_causes
from reports.causes.finding import Finding, classify_record
from reports.compiled_kernels.call_estimates import build_call_charts
from reports.compiled_kernels.gpu_kernel_bounds import build_bounds
from reports.compiled_kernels.tpu_kernel_schedules import build_schedules
from reports.compiled_section import build_compiled_table
from reports.detection_section import build_detection
from reports.ratio_figure import render_distributions
from reports.speed_section import build_speed_panels
from reports.template_environment import create_environment

SHOWN_WITHOUT_SCRIPT = 5
"""Records of each group of a finding that are there without the script."""
MAX_FAILURES = 200
"""Rows in the tables of expected failures: enough to see every pattern, few enough to open on a phone."""
MAX_ROWS = 200
MAX_NOTES = 50
SECTIONS = (
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
    conformity.CONFORMS: "pass",
    conformity.KNOWN_FAILURES: "expected",
    conformity.DOES_NOT_CONFORM: "fail",
    conformity.NOT_JUDGED: "unjudged",
}
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
    words.replace("x", text_format.TIMES)
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
    groups: tuple[conformity.FailureGroup, ...]


def render_page(
    records: Sequence[Record], run: RunInfo, measurements: Sequence[Measurement] = (), file: str = "*.jsonl"
) -> str:
    """The whole page as text; the same arguments always give the same text. `file` is where the records lie."""
    made = create_environment()
    assert made.loader is not None
    script, _, _ = made.loader.get_source(made, "report.js")
    # The policy of the page lets this script run and no other, whatever a record says.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    facts = {"script": Markup(script), "script_hash": f"sha256-{digest}"}
    return made.get_template("report.html.j2").render(_page(records, run, measurements, file) | facts)


def save_page(path: Path, records: Sequence[Record], run: RunInfo, measurements: Sequence[Measurement] = ()) -> None:
    """Write the page to `path`."""
    beside = path.with_suffix(".jsonl")
    file = shlex.quote(beside.name) if beside.exists() else "*.jsonl"
    output_files.write_text(path, render_page(records, run, measurements, file))


def build_free_table(rows: Sequence[Mapping[str, Any]], *, cap: int = MAX_ROWS) -> FreeTable:
    """Dictionaries as a table, columns in the order of first appearance."""
    columns = tuple(dict.fromkeys(str(column) for row in rows for column in row))
    numeric = frozenset(c for c in columns if all(isinstance(row.get(c, 0), int | float | None) for row in rows))
    return FreeTable(columns, tuple(rows[:cap]), numeric, max(0, len(rows) - cap))


def _page(records: Sequence[Record], run: RunInfo, measurements: Sequence[Measurement], file: str) -> dict[str, Any]:
    standings = conformity.build_standings(records)
    panels = _build_panels(records, run)
    named = {label: " ".join(map(shlex.quote, names)) for label, names in run.files.items()}
    files = record_table.RecordFiles(file, named, run.runs)
    return {
        "run": run,
        "record_count": len(records),
        "total": conformity.count_verdicts(records),
        "standings": standings,
        "headline": _capitalize(text_format.format_headline(standings, run)),
        "features": matrices.build_feature_matrix(records),
        "checks": matrices.build_check_matrix(records),
        "findings": panels,
        "data": record_table.serialize_records(records, [panel.finding.records for panel in panels], files),
        "cells": record_table.build_cell_records(records, files),
        "anchors": record_table.build_anchors(records),
        **_list_cases(records),
        "differ": shared_evidence.find_flag_differences(records),
        "expected": conformity.group_failures(records, verdicts={EXPECTED_FAIL}, cap=MAX_FAILURES),
        "margins": measures.build_margins(records),
        "gradients": measures.build_gradient_table(records),
        "cost": measures.build_cost_table(records),
        "compiled": build_compiled_table(records),
        "schedules": build_schedules(records),
        "calls": build_call_charts(records),
        "bounds": build_bounds(records),
        "comparisons": build_speed_panels(measurements),
        "detection": build_detection(run.detection),
        "coverage": build_free_table(run.coverage),
        "tolerances": build_free_table(run.tolerances),
        **_list_reasons(records),
        **_build_distributions(records),
        **_vocabulary(),
    }


def _list_cases(records: Sequence[Record]) -> dict[str, Any]:
    cases, hidden = record_table.list_cases(records)
    return {"cases": cases, "cases_hidden": hidden, "addressed": {line.case for line in cases}}


def _build_panels(records: Sequence[Record], run: RunInfo) -> list[FindingPanel]:
    """Every finding with all of its records, of which each group shows a few."""
    panels = []
    for number, finding in enumerate(root_causes.find_root_causes(records, run.probes), 1):
        groups = conformity.group_failures(finding.records, cap=len(finding.records))
        groups = [dataclasses.replace(group, shown=min(group.shown, SHOWN_WITHOUT_SCRIPT)) for group in groups]
        groups.sort(key=lambda group: classify_record(group.records[0]) != finding.kind)
        panels.append(
            FindingPanel(
                number,
                finding,
                finding_text.format_title(finding),
                tuple(finding_text.list_facts(finding)),
                tuple(groups),
            )
        )
    return panels


def _list_reasons(records: Sequence[Record]) -> dict[str, Any]:
    reasons = conformity.group_reasons(records)
    hidden = max(0, len(reasons) - MAX_ROWS)
    return {
        "reasons": reasons[:MAX_ROWS],
        "reasons_hidden": hidden,
        "left_out": conformity.find_undecided_rows(records),
    }


def _build_distributions(records: Sequence[Record]) -> dict[str, Any]:
    distributions = measures.build_distributions(records)
    return {
        "distributions": distributions[:MAX_ROWS],
        # Markup of our own making: matplotlib has escaped the names in it.
        "figure": Markup(render_distributions(distributions)),
        "any_rms": any(d.max_rms_share is not None for d in distributions),
    }


def _vocabulary() -> dict[str, Any]:
    return {
        "verdicts": VERDICTS,
        "red": RED,
        "glyphs": text_format.GLYPHS,
        "states": STATES,
        "legend": LEGEND,
        "contents": SECTIONS,
        "titles": dict(SECTIONS),
        "numbers": {anchor: number for number, (anchor, _) in enumerate(SECTIONS, 1)},
        "record_columns": RECORD_COLUMNS,
        "margin_buckets": MARGIN_BUCKETS,
        "most_notes": MAX_NOTES,
        "most_failures": MAX_FAILURES,
        "loud": PROMINENT_VERDICTS,
        "metrics": conformity.list_metrics,
        "over": lambda metric: conformity.rank_share(metric.share) > 1,
        "severity": conformity.rank_share,
        "standing_text": text_format.format_standing,
        "left_out_text": text_format.format_undecided_rows,
        "evidence": finding_text.list_evidence,
        "flags_differ_text": text_format.format_flag_differences,
        "declared_text": text_format.format_declared,
        "state_text": text_format.format_state,
        "shortfall_text": text_format.format_shortfall,
    }


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:] if text.startswith("could") else text
