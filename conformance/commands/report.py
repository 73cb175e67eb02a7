"""Implement `report`: merge records and measurements of earlier runs, and render them as one HTML page."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from conformance import measurements
from conformance.commands.argument_lookup import format_command_line
from conformance.judging.run_aggregation import aggregate_runs
from conformance.measurements import Measurement
from conformance.sensitivity import detection_table
from conformance.session import input_files
from conformance.session.failures import CannotJudge
from conformance.session.probes import bug_diagnosis
from conformance.session.run_outputs import check_writable
from reports import html_page, speed_page
from reports.page_model import build_summary


def render_report(arguments: argparse.Namespace) -> int:
    """Merge records and measurements of earlier runs, and write one HTML page."""
    path = check_writable(arguments.report, "report")
    if path.resolve() in [input_files.parse_input_path(name).resolve() for name in arguments.records]:
        raise CannotJudge(f"--report={arguments.report} is one of the files to be read: give the page its own file")
    timed = [name for name in arguments.records if _holds_measurements(name)]
    measured = measurements.merge_measurements(*(_read_measurements(name) for name in timed))
    recorded = [one for name in arguments.records if name not in timed for one in input_files.read_recorded_runs(name)]
    found, info = aggregate_runs(recorded, command=format_command_line(), detection=detection_table.load_table())
    info = bug_diagnosis.add_diagnoses(info, found)
    if measured:
        environment = info.environment if recorded else {}
        rendered = {"rendered from": ", ".join(Path(name).name for name in arguments.records)}
        info = dataclasses.replace(info, environment=environment | rendered)
    if not found and not measured:
        raise CannotJudge(f"there is no record in {', '.join(arguments.records)}")
    try:
        if found:
            html_page.save_page(path, build_summary(found, info), measured)
        else:
            speed_page.save_speed_page(path, measured, info)
    except OSError as error:
        raise CannotJudge(f"{path} cannot be written: {error.strerror or error}") from error
    return 0


def _holds_measurements(name: str) -> bool:
    try:
        return measurements.has_measurements(Path(name))
    except OSError as error:
        raise CannotJudge(f"{name} cannot be read: {error.strerror or error}") from error


def _read_measurements(name: str) -> list[Measurement]:
    try:
        return measurements.read_measurements(Path(name))
    except ValueError as error:
        raise CannotJudge(str(error)) from error
