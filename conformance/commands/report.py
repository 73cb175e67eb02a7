"""Implement `report`: merge records and measurements of earlier runs, print the verdict, and render one HTML page."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from conformance.commands.argument_lookup import format_command_line
from conformance.follow_up import bug_diagnosis
from conformance.judging.run_aggregation import aggregate_runs, find_missing_shards
from conformance.sensitivity import detection_table
from conformance.session import input_files
from conformance.session.failures import CannotJudge, choose_exit_code
from conformance.session.run_outputs import check_writable, write_summary
from reports import findings_document, html_page, markdown_summary, output_files, speed_page, terminal
from reports.conformity import WRONG
from reports.output_files import TABLE
from reports.page_model import Summary, build_summary
from reports.records import UNJUDGED, RecordedRun, serialize_strict_json
from reports.records.measurement import merge_measurements


def render_report(arguments: argparse.Namespace) -> int:
    """Merge records and measurements of earlier runs, print the verdict, and write the page if one is asked for.

    With `--gate` the exit code is that of a run which judged all of it: 0 if every implementation conforms, 1 if one
    does not, 2 if something is missing or nothing was judged.
    """
    path = check_writable(arguments.report, "report") if arguments.report is not None else None
    text = check_writable(arguments.markdown, "markdown") if arguments.markdown is not None else None
    document = check_writable(arguments.json, "json", TABLE) if arguments.json is not None else None
    read = [input_files.parse_input_path(name).resolve() for name in arguments.records]
    for option, place in (("report", path), ("markdown", text), ("json", document)):
        if place is not None and place.resolve() in read:
            raise CannotJudge(f"--{option}={place} is one of the files to be read: give it its own file")
    timed = [name for name in arguments.records if input_files.holds_measurements(name)]
    measured = merge_measurements(*(input_files.read_measurements(name) for name in timed))
    recorded = [one for name in arguments.records if name not in timed for one in input_files.read_recorded_runs(name)]
    found, info = aggregate_runs(recorded, command=format_command_line(), detection=detection_table.load_table())
    info = bug_diagnosis.add_diagnoses(info, found)
    if measured:
        environment = info.environment if recorded else {}
        rendered = {"rendered from": ", ".join(Path(name).name for name in arguments.records)}
        info = dataclasses.replace(info, environment=environment | rendered)
    if not found and not measured:
        raise CannotJudge(f"there is no record in {', '.join(arguments.records)}")
    summary = build_summary(found, info)
    missing = list_missing(recorded, summary)
    del recorded  # frees the lines of the files before the page is built
    try:
        if path is not None and found:
            html_page.save_page(path, summary, measured)
        elif path is not None:
            speed_page.save_speed_page(path, measured, info)
        if text is not None:
            write_summary(text, markdown_summary.format_markdown(summary))
        if document is not None:
            findings = findings_document.build_findings_document(summary)
            output_files.write_text(document, f"{serialize_strict_json(findings)}\n")
    except OSError as error:
        raise CannotJudge(f"{error.filename or path} cannot be written: {error.strerror or error}") from error
    console = Console()
    if measured:
        terminal.print_measurements(measured, console)
    if found:
        terminal.print_summary(summary, console, arguments.report or "")
    for line in missing:
        console.print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)
    if not arguments.gate:
        return 0
    is_wrong = any(one.conformity in WRONG for one in summary.implementations)
    return choose_exit_code(is_wrong=is_wrong, is_judged=not missing)


def list_missing(recorded: Sequence[RecordedRun], summary: Summary) -> list[str]:
    """List why merged runs are no complete judgement, a line each: shards, jobs and implementations that are missing.

    A kernel whose chip this machine lacks has unjudged records only. It counts if nothing else was judged, as in a run.
    """
    lines = find_missing_shards(recorded)
    for one in summary.implementations:
        extent, counts = one.extent, one.counts
        if extent.is_partial or extent.stopped:
            planned = f" of {extent.planned:,}" if extent.planned is not None else ""
            lines.append(f"{one.implementation.label}: {extent.done:,}{planned} jobs were judged")
        elif not counts.judged and (counts.total > counts[UNJUDGED] or not summary.total.judged):
            lines.append(f"{one.implementation.label}: nothing was judged")
    judged = {one.implementation.name for one in summary.implementations}
    planned_names = dict.fromkeys(job.implementation for one in recorded if one.run for job in one.run.jobs)
    lines += [f"{name}: none of its jobs was judged" for name in planned_names if name not in judged]
    if not summary.implementations:
        lines.append("nothing was judged: these files hold measurements only")
    return lines
