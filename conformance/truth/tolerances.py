"""The tolerance table: limits of a dtype and observable, in units of the error bound (docs/numerics.md, section 6).

They follow from what correct implementations reached. The largest ratio has one limit for all: 1.5 times the largest of
any dtype and observable, rounded up to a whole number. It is the extreme of many elements, and has a long tail: a
correct kernel reached 2.05 in dk of f32 outside the grid, where 0.73 is the most on it. Its root mean square there was
0.178, where 0.15 is the most. So the root mean square has limits of its own: three times the largest of that dtype and
observable, rounded up to a tenth, and never more than 1.5 times the largest of all, rounded up to a half. Errors of few
rows may have one cause, hence the room. It is judged only where there are enough elements for it to mean something.

They hold for what was measured: the arithmetic that nobody need declare, on the platforms of the calibration. Whatever
declares further roundings, or runs elsewhere, is judged by the widest of all limits (`Tolerances.of`).

What was reached, and where it comes from, is in `calibration.json` beside this file (`conformance.truth.calibration`
makes it). A limit is never widened to make a case pass: a correct kernel that fails has declared the wrong arithmetic,
or the bound lacks a term.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cases.operand_registry import OBSERVABLES
from conformance.contract import Arithmetic

DTYPES = ("f32", "bf16", "f16")
RMS_MIN_ELEMENTS = 256
"""With fewer judged elements the root mean square is too close to the maximum to add anything."""

CALIBRATION = Path(__file__).with_name("calibration.json")
CALIBRATION_SCHEMA = "attention-conformance/calibration/1"
_HEADROOM = 1.5
_HEADROOM_RMS = 3.0
_RMS_STEPS_PER_UNIT = 10  # in 1


@dataclasses.dataclass(frozen=True)
class Limit:
    """Largest allowed ratio, largest allowed root mean square, and where the numbers come from."""

    ratio: float
    rms: float
    source: str


@dataclasses.dataclass(frozen=True)
class Tolerances:
    """The table in force, and the platforms on which its figures were measured."""

    limits: Mapping[tuple[str, str], Limit]
    platforms: frozenset[str] = frozenset()

    def of(self, arithmetic: Arithmetic, platform: str) -> Tolerances:
        """The table for an implementation that declares `arithmetic`, on a platform (JAX's name of the backend)."""
        plain = dataclasses.replace(arithmetic, probabilities="input") == Arithmetic()  # the stricter one costs nothing
        return self if plain and platform in self.platforms else self._widen_all()

    def _widen_all(self) -> Tolerances:
        """Every limit as wide as the widest that was calibrated; what the user has set stays."""
        calibrated = load_default_tolerances().limits
        ratio = max(limit.ratio for limit in calibrated.values())
        rms = max(limit.rms for limit in calibrated.values())
        why = "the widest limit of all: nothing narrower was measured for this arithmetic and platform"
        wide = {key: Limit(ratio, rms, why) if x == calibrated.get(key) else x for key, x in self.limits.items()}
        return dataclasses.replace(self, limits=wide)

    def limit(self, dtype: str, observable: str) -> Limit:
        """The limit for an observable in a dtype."""
        return self.limits[dtype, observable]

    def rows(self) -> list[dict[str, Any]]:
        """The table as plain rows, for reports."""
        return [
            {"dtype": dtype, "observable": name, "limit": x.ratio, "rms_limit": x.rms, "source": x.source}
            for (dtype, name), x in self.limits.items()
        ]


@functools.cache
def load_default_tolerances() -> Tolerances:
    """The calibrated table."""
    return build_tolerances(load_calibration())


def build_tolerances(calibration: Mapping[str, Any]) -> Tolerances:
    """The table that the figures of correct implementations lead to (module docstring).

    Raises:
      ValueError: for figures of another schema, or a dtype and observable without any.
    """
    if calibration.get("schema") != CALIBRATION_SCHEMA:
        raise ValueError(f"schema of the calibration is {calibration.get('schema')!r}, must be {CALIBRATION_SCHEMA!r}")
    rows = {(row["dtype"], row["observable"]): row for row in calibration["rows"]}
    if missing := [f"{d}.{o}" for d in DTYPES for o in OBSERVABLES if (d, o) not in rows]:
        raise ValueError(f"the calibration has no row for {', '.join(missing)}")
    ratio = float(math.ceil(_HEADROOM * max(row["max_ratio"] for row in rows.values())))
    widest = math.ceil(2 * _HEADROOM * max(row["max_rms"] or 0.0 for row in rows.values())) / 2
    name = calibration["provenance"]["name"]
    limits = {
        (d, o): Limit(
            ratio, min(widest, _compute_rms_limit(rows[d, o]["max_rms"])), _format_limit_source(rows[d, o], name)
        )
        for d in DTYPES
        for o in OBSERVABLES
    }
    return Tolerances(limits, frozenset(calibration["provenance"]["platforms"]))


def _compute_rms_limit(largest: float | None) -> float:
    """No limit of its own for what never has elements enough."""
    return (
        math.inf if largest is None else math.ceil(_RMS_STEPS_PER_UNIT * _HEADROOM_RMS * largest) / _RMS_STEPS_PER_UNIT
    )


@functools.cache
def load_calibration() -> Mapping[str, Any]:
    """What correct implementations reached, as it is kept."""
    return json.loads(CALIBRATION.read_text())


def _format_limit_source(row: Mapping[str, Any], name: str) -> str:
    rms = "" if row["max_rms"] is None else f" (rms {row['max_rms']:.2f})"
    return f"correct kernels reached {row['max_ratio']:.2f}{rms} {name}"


def override_limits(table: Tolerances, overrides: Mapping[str, float], source: str) -> Tolerances:
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
    return dataclasses.replace(table, limits=limits)
