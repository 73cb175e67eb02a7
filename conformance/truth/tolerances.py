"""The tolerance table: one limit a dtype and observable, in units of the error bound (docs/numerics.md, section 6).

Both limits follow from what correct implementations reached, by a fixed rule: 1.5 times the largest figure of any dtype
and observable, rounded up, to a whole number for the largest ratio and to a half for the root mean square (judged where
there are enough elements for it to mean something). What was reached is in `calibration.json` beside this file, with
where it comes from; `conformance.truth.calibration` makes it. A limit is never widened to make a case pass: a correct
kernel that fails has declared the wrong arithmetic, or the bound lacks a term.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cases.operands import OBSERVABLES

DTYPES = ("f32", "bf16", "f16")
RMS_MIN_ELEMENTS = 256
"""With fewer judged elements the root mean square is too close to the maximum to add anything."""

CALIBRATION = Path(__file__).with_name("calibration.json")
CALIBRATION_SCHEMA = "attention-conformance/calibration/1"
_HEADROOM = 1.5


@dataclasses.dataclass(frozen=True)
class Limit:
    """Largest allowed ratio, largest allowed root mean square, and where the numbers come from."""

    ratio: float
    rms: float
    source: str


@dataclasses.dataclass(frozen=True)
class Tolerances:
    """The table in force."""

    limits: Mapping[tuple[str, str], Limit]

    def limit(self, dtype: str, observable: str) -> Limit:
        """The limit for an observable in a dtype."""
        return self.limits[dtype, observable]

    def rows(self) -> list[dict[str, Any]]:
        """The table as plain rows, for reports."""
        return [
            {"dtype": dtype, "observable": name, "limit": x.ratio, "rms_limit": x.rms, "source": x.source}
            for (dtype, name), x in self.limits.items()
        ]


def default() -> Tolerances:
    """The calibrated table."""
    return from_calibration(_calibration())


def from_calibration(calibration: Mapping[str, Any]) -> Tolerances:
    """The table that the figures of correct implementations lead to (module docstring).

    Raises:
      ValueError: for figures of another schema, or a dtype and observable without any.
    """
    if calibration.get("schema") != CALIBRATION_SCHEMA:
        raise ValueError(f"schema of the calibration is {calibration.get('schema')!r}, must be {CALIBRATION_SCHEMA!r}")
    rows = {(row["dtype"], row["observable"]): row for row in calibration["rows"]}
    if missing := [f"{d}.{o}" for d in DTYPES for o in OBSERVABLES if (d, o) not in rows]:
        raise ValueError(f"the calibration has no row for {', '.join(missing)}")
    ratio = math.ceil(_HEADROOM * max(row["max_ratio"] for row in rows.values()))
    rms = math.ceil(2 * _HEADROOM * max(row["max_rms"] or 0.0 for row in rows.values())) / 2
    name = calibration["provenance"]["name"]
    return Tolerances(
        {(d, o): Limit(float(ratio), rms, _source(rows[d, o], name)) for d in DTYPES for o in OBSERVABLES}
    )


@functools.cache
def _calibration() -> Mapping[str, Any]:
    return json.loads(CALIBRATION.read_text())


def _source(row: Mapping[str, Any], name: str) -> str:
    rms = "" if row["max_rms"] is None else f" (rms {row['max_rms']:.2f})"
    return f"correct kernels reached {row['max_ratio']:.2f}{rms} {name}"


def overridden(table: Tolerances, overrides: Mapping[str, float], source: str) -> Tolerances:
    """The table with limits replaced.

    Args:
      table: the table to start from.
      overrides: `"dtype.observable"` to the new largest ratio, for example `{"bf16.out": 5.0}`.
      source: where the overrides come from; reports print it.

    Raises:
      ValueError: for an unknown dtype or observable, or a limit that is not positive.
    """
    limits = dict(table.limits)
    for key, value in overrides.items():
        dtype, _, observable = key.partition(".")
        if (dtype, observable) not in limits:
            raise ValueError(
                f"tolerance {key!r} is not dtype.observable with dtype in {DTYPES} and observable in {OBSERVABLES}"
            )
        if not value > 0:
            raise ValueError(f"tolerance {key!r} must be positive, got {value}")
        old = limits[dtype, observable]
        limits[dtype, observable] = Limit(float(value), old.rms * float(value) / old.ratio, source)
    return Tolerances(limits)
