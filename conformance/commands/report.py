"""`report`: records and measurements of earlier runs, merged, as one page."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from conformance.bench import measurements
from conformance.bench.measurements import Measurement
from conformance.commands import lookup
from conformance.commands.errors import CannotJudge
from conformance.commands.outputs import command_line, writable
from conformance.commands.probes import diagnose
from conformance.judging.evidence import gather
from conformance.sensitivity import detection
from reports import html, side_by_side


def render_report(arguments: argparse.Namespace) -> int:
    """`report`: records and measurements of earlier runs, merged, as one page."""
    path = writable(arguments.report, "report")
    if path.resolve() in [lookup.input_file(name).resolve() for name in arguments.records]:
        raise CannotJudge(f"--report={arguments.report} is one of the files to be read: give the page its own file")
    timed = [name for name in arguments.records if _holds_measurements(name)]
    measured = measurements.merge(*(_measurements(name) for name in timed))
    recorded = [one for name in arguments.records if name not in timed for one in lookup.recorded(name)]
    found, info = gather(recorded, command=command_line(), detection=detection.load())
    info = diagnose.told(info, found)
    if measured:
        environment = info.environment if recorded else {}
        rendered = {"rendered from": ", ".join(Path(name).name for name in arguments.records)}
        info = dataclasses.replace(info, environment=environment | rendered)
    if not found and not measured:
        raise CannotJudge(f"there is no record in {', '.join(arguments.records)}")
    try:
        if found:
            html.write(path, found, info, measured)
        else:
            side_by_side.write(path, measured, info)
    except OSError as error:
        raise CannotJudge(f"{path} cannot be written: {error.strerror or error}") from error
    return 0


def _holds_measurements(name: str) -> bool:
    try:
        return measurements.holds(Path(name))
    except OSError as error:
        raise CannotJudge(f"{name} cannot be read: {error.strerror or error}") from error


def _measurements(name: str) -> list[Measurement]:
    try:
        return measurements.read_jsonl(Path(name))
    except ValueError as error:
        raise CannotJudge(str(error)) from error
