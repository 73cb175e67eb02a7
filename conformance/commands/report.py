"""`report`: records of earlier runs, merged, as one page."""

from __future__ import annotations

import argparse
from pathlib import Path

from conformance import detection, records
from conformance.cli import CannotJudge
from conformance.commands import common
from conformance.records import RunInfo
from reports import html


def render_report(arguments: argparse.Namespace) -> int:
    """`report`: records of earlier runs, merged, as one page."""
    path = common.writable(arguments.report, "report")
    if path.resolve() in [Path(name).resolve() for name in arguments.records]:
        raise CannotJudge(f"--report={arguments.report} is one of the files to be read: give the page its own file")
    found = records.merge(*(common.read(name) for name in arguments.records))
    if not found:
        raise CannotJudge(f"there is no record in {', '.join(arguments.records)}")
    info = RunInfo(
        command=common.command(),
        level="merged records",
        environment={"rendered from": ", ".join(Path(name).name for name in arguments.records)},
        tolerances=[],
        detection=detection.load(),
        seconds=round(sum(record.seconds for record in found), 1),
    )
    html.write(path, found, info)
    return 0
