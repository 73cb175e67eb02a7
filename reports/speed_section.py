"""Measurements as a section of the report: for each case and phase, the implementations side by side."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from conformance import output_files
from conformance.measurements import AGREES, DIFFERS, Measurement
from conformance.records import RunInfo
from reports.template_environment import create_environment

_LOWEST_SPAN = 1.5
"""Bars of speed span at least this factor to either side, so that noise does not fill the page."""


@dataclasses.dataclass(frozen=True)
class Bar:
    """Where a speed lies on its case's logarithmic axis, in percent of the width."""

    lower: float
    median: float
    upper: float


@dataclasses.dataclass(frozen=True)
class SpeedPanel:
    """One case in one phase on one kind of device."""

    device: str
    case: str
    phase: str
    rows: tuple[Measurement, ...]

    @property
    def ceiling(self) -> float | None:
        """FLOP/s that a large matrix product reached."""
        return next((row.ceiling for row in self.rows if row.ceiling is not None), None)

    @property
    def rounds(self) -> int:
        """Rounds of the round robin."""
        return max((len(row.samples) for row in self.rows), default=0)

    @property
    def fastest(self) -> str:
        """The implementation with the least median time, of two or more whose results agree with the oracle."""
        medians = {row.implementation: row.seconds.median for row in self.rows if row.outcome == AGREES and row.seconds}
        return min(medians, key=lambda name: medians[name]) if len(medians) > 1 else ""

    def bar(self, row: Measurement) -> Bar | None:
        """The row's speed as a bar."""
        if row.speed is None:
            return None
        return Bar(*(self._place(value) for value in row.speed))

    @property
    def one(self) -> float:
        """Where the baseline's speed is, in percent."""
        return self._place(1.0)

    def _place(self, speed: float) -> float:
        span = max([math.log(_LOWEST_SPAN), *(abs(math.log(value)) for row in self.rows for value in row.speed or ())])
        return round(50 + 48 * math.log(speed) / span, 2)


def build_speed_panels(measurements: Sequence[Measurement]) -> tuple[SpeedPanel, ...]:
    """Measurements by device, case and phase, in the order in which they come."""
    groups: dict[tuple[str, str, str], list[Measurement]] = {}
    for measurement in measurements:
        groups.setdefault((measurement.device, measurement.case, measurement.phase), []).append(measurement)
    return tuple(SpeedPanel(*key, tuple(rows)) for key, rows in groups.items())


def format_speed_headline(measurements: Sequence[Measurement]) -> str:
    """What was measured, in one sentence; no implementation is called the best over all cases."""
    timed = [measurement for measurement in measurements if measurement.samples]
    if not timed:
        return "Nothing was timed."
    names = len({measurement.implementation for measurement in timed})
    places = len({(measurement.case, measurement.phase) for measurement in timed})
    wrong = sum(measurement.outcome == DIFFERS for measurement in timed)
    rest = f", of which {wrong} timings are of results that differ from the oracle" if wrong else ""
    return f"{names} implementation{'s' * (names > 1)} side by side in {places} comparison{'s' * (places > 1)}{rest}."


def render_speed_page(measurements: Sequence[Measurement], run: RunInfo) -> str:
    """A page with this section alone; the same measurements and run always give the same text."""
    return (
        create_environment()
        .get_template("side_by_side_page.html.j2")
        .render(run=run, comparisons=build_speed_panels(measurements), headline=format_speed_headline(measurements))
    )


def save_speed_page(path: Path, measurements: Sequence[Measurement], run: RunInfo) -> None:
    """Write the page to `path`."""
    output_files.write_text(path, render_speed_page(measurements, run))
