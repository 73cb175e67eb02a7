"""Build the report section on time and memory: for each case and phase, the implementations side by side."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from reports.record_groups import group_by
from reports.records.measurement import AGREES, DIFFERS, Measurement

_MIN_SPAN = 1.5
"""The axis of speeds reaches at least this factor to either side of the baseline, so that noise looks small."""


@dataclasses.dataclass(frozen=True)
class SpeedBar:
    """The positions of the quartiles of a speed on a logarithmic axis, in percent of its width."""

    lower: float
    median: float
    upper: float


@dataclasses.dataclass(frozen=True)
class SpeedPanel:
    """The measurements of one case in one phase on one kind of device."""

    device: str
    case: str
    phase: str
    rows: tuple[Measurement, ...]

    @property
    def ceiling(self) -> float | None:
        """FLOP/s that a large matrix product reached on the device; None if not measured."""
        return next((row.ceiling for row in self.rows if row.ceiling is not None), None)

    @property
    def rounds(self) -> int:
        """Number of timing rounds. Each round times every implementation in turn."""
        return max((len(row.samples) for row in self.rows), default=0)

    @property
    def fastest(self) -> str:
        """The fastest implementation, by median time, that agrees with the oracle; empty unless two or more agree."""
        medians = {row.implementation: row.seconds.median for row in self.rows if row.outcome == AGREES and row.seconds}
        return min(medians, key=lambda name: medians[name]) if len(medians) > 1 else ""

    @property
    def baseline_place(self) -> float:
        """The position of the baseline's speed on the axis, in percent of the axis's width."""
        return self._locate(1.0)

    def locate_speed(self, row: Measurement) -> SpeedBar | None:
        """Return the position of a row's speed on the axis, or None if the row has no speed."""
        if row.speed is None:
            return None
        return SpeedBar(*map(self._locate, row.speed))

    def _locate(self, speed: float) -> float:
        span = max([math.log(_MIN_SPAN), *(abs(math.log(value)) for row in self.rows for value in row.speed or ())])
        return round(50 + 48 * math.log(speed) / span, 2)


def build_speed_panels(measurements: Sequence[Measurement]) -> tuple[SpeedPanel, ...]:
    """Build a panel for each device, case and phase, in the order in which they come."""
    groups = group_by(measurements, lambda one: (one.device, one.case, one.phase))
    return tuple(SpeedPanel(*key, tuple(rows)) for key, rows in groups.items())


def format_speed_headline(measurements: Sequence[Measurement]) -> str:
    """Format what was measured as one sentence; no implementation is called the best over all cases."""
    timed = [measurement for measurement in measurements if measurement.samples]
    if not timed:
        return "Nothing was timed."
    names = len({measurement.implementation for measurement in timed})
    places = len({(measurement.case, measurement.phase) for measurement in timed})
    wrong = sum(measurement.outcome == DIFFERS for measurement in timed)
    rest = f", of which {wrong} timings are of results that differ from the oracle" if wrong else ""
    return f"{names} implementation{'s' * (names > 1)} side by side in {places} comparison{'s' * (places > 1)}{rest}."
