"""Render an HTML page that shows only timings: the section on speed and memory, without judged records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from reports import output_files
from reports.records import RunInfo
from reports.records.measurement import Measurement
from reports.speed_section import build_speed_panels, format_speed_headline
from reports.template_environment import create_environment


def render_speed_page(measurements: Sequence[Measurement], run: RunInfo) -> str:
    """Render the page of timings as HTML text. The same measurements and run always give the same text."""
    template = create_environment().get_template("side_by_side_page.html.j2")
    return template.render(
        run=run, panels=build_speed_panels(measurements), headline=format_speed_headline(measurements)
    )


def save_speed_page(path: Path, measurements: Sequence[Measurement], run: RunInfo) -> None:
    """Render the page of timings and write it to `path`."""
    output_files.write_text(path, render_speed_page(measurements, run))
