"""Limits on results by dtype and observable, in units of the error bound (docs/numerics.md, section 6).

The limits follow from what correct implementations reached, which is in `calibration.json`
(`conformance.truth.calibration` writes it):

- The largest ratio has one limit for all dtypes and observables: 1.5 times the largest ratio of any of them, rounded up
  to a whole number. The largest ratio is the extreme of many elements, so its distribution has a long tail. The largest
  on the fixed set of cases (the grid) is 0.73; on a case outside the grid, a correct kernel reached 2.05 in dk of f32.
- The root mean square of the ratios varies less: the largest on the grid is 0.15, and the same kernel reached 0.178
  outside it. So each dtype and observable has a limit of its own: three times its largest root mean square, rounded up
  to a tenth. This limit is never more than 1.5 times the largest root mean square of all, rounded up to a half. The
  factor of three leaves room for errors of few rows that have one cause. The root mean square is judged only if there
  are enough elements (`RMS_MIN_ELEMENTS`).

These limits hold for what was measured: the default arithmetic, on the platforms of the calibration. An implementation
that declares further roundings, or runs on another platform, is judged by the widest of all limits (`Tolerances.of`).
So is a result without a row, such as the gradient of a new operand: `calibrate` measures it once kernels return it.

A limit is never widened to make a case pass. If a correct kernel fails, it declares the wrong arithmetic, or the bound
lacks a term.
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
from impls.contract.declarations import Arithmetic

DTYPES = ("f32", "bf16", "f16")
RMS_MIN_ELEMENTS = 256
"""Fewest judged elements for which the root mean square says more than the maximum does."""

CALIBRATION = Path(__file__).with_name("calibration.json")
CALIBRATION_SCHEMA = "attention-conformance/calibration/1"
_HEADROOM = 1.5
_HEADROOM_RMS = 3.0
_RMS_STEPS_PER_UNIT = 10  # limits of the root mean square are rounded up to a tenth


@dataclasses.dataclass(frozen=True)
class Limit:
    """Limits on one observable in one dtype, in units of its error bound."""

    ratio: float  # the largest allowed ratio
    rms: float  # the largest allowed root mean square of the ratios
    source: str  # a sentence for reports that says where both numbers come from


@dataclasses.dataclass(frozen=True)
class Tolerances:
    """The limits by `(dtype, observable)`, and the JAX backends on which they were calibrated."""

    limits: Mapping[tuple[str, str], Limit]
    platforms: frozenset[str] = frozenset()

    def of(self, arithmetic: Arithmetic, platform: str) -> Tolerances:
        """Return the table for an implementation that declares `arithmetic`, on a platform (a JAX backend)."""
        # Probabilities in f32 round less than the default, so declaring them does not widen the limits.
        plain = dataclasses.replace(arithmetic, probabilities="input") == Arithmetic()
        return self if plain and platform in self.platforms else self._widen_all()

    def _widen_all(self) -> Tolerances:
        """Return the table with every calibrated limit replaced by the widest one; limits set by the user stay."""
        calibrated = load_default_tolerances().limits
        ratio = max(limit.ratio for limit in calibrated.values())
        rms = max(limit.rms for limit in calibrated.values())
        why = "the widest limit of all, since no limit was measured for this arithmetic and platform"
        wide = {key: Limit(ratio, rms, why) if x == calibrated.get(key) else x for key, x in self.limits.items()}
        return dataclasses.replace(self, limits=wide)

    def limit(self, dtype: str, observable: str) -> Limit:
        """Return the limit of an observable in a dtype."""
        return self.limits[dtype, observable]

    def rows(self) -> list[dict[str, Any]]:
        """Return the table as one dictionary for each dtype and observable, for reports."""
        return [
            {"dtype": dtype, "observable": name, "limit": x.ratio, "rms_limit": x.rms, "source": x.source}
            for (dtype, name), x in self.limits.items()
        ]


@functools.cache
def load_default_tolerances() -> Tolerances:
    """Load the limits that follow from the project's own calibration."""
    return build_tolerances(load_calibration())


def build_tolerances(calibration: Mapping[str, Any]) -> Tolerances:
    """Build the tolerance table from a calibration, by the module's rules. Raises `ValueError` for another schema."""
    if calibration.get("schema") != CALIBRATION_SCHEMA:
        raise ValueError(f"schema of the calibration is {calibration.get('schema')!r}, must be {CALIBRATION_SCHEMA!r}")
    rows = {(row["dtype"], row["observable"]): row for row in calibration["rows"]}
    ratio = float(math.ceil(_HEADROOM * max(row["max_ratio"] for row in rows.values())))
    widest = math.ceil(2 * _HEADROOM * max(row["max_rms"] or 0.0 for row in rows.values())) / 2
    name = calibration["provenance"]["name"]
    limits = {
        (d, o): Limit(ratio, min(widest, _compute_rms_limit(row["max_rms"])), _format_limit_source(row, name))
        if (row := rows.get((d, o)))
        else Limit(ratio, widest, "the widest limit of all, since no correct kernel was measured")
        for d in DTYPES
        for o in OBSERVABLES
    }
    return Tolerances(limits, frozenset(calibration["provenance"]["platforms"]))


def _compute_rms_limit(largest: float | None) -> float:
    """Compute the limit of a root mean square; infinite if it is never judged."""
    return (
        math.inf if largest is None else math.ceil(_RMS_STEPS_PER_UNIT * _HEADROOM_RMS * largest) / _RMS_STEPS_PER_UNIT
    )


@functools.cache
def load_calibration() -> Mapping[str, Any]:
    """Load `calibration.json`: the largest ratios that correct implementations reached, by dtype and observable."""
    return json.loads(CALIBRATION.read_text())


def _format_limit_source(row: Mapping[str, Any], name: str) -> str:
    """Format the sentence that says where the limits of a calibration row come from."""
    rms = "" if row["max_rms"] is None else f" (rms {row['max_rms']:.2f})"
    return f"correct kernels reached {row['max_ratio']:.2f}{rms} {name}"


def override_limits(table: Tolerances, overrides: Mapping[str, float], source: str) -> Tolerances:
    """Return a table with some limits replaced; the limit of the root mean square scales with that of the ratio.

    `overrides` has new largest ratios by `"dtype.observable"`, such as `{"bf16.out": 5.0}`; reports print `source`.
    Raises `ValueError` if a dtype or observable is unknown, or a limit is not positive.
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
