"""The tolerance table: one limit a dtype and observable, in units of the error bound.

Every limit is about twice the largest ratio that correct implementations reached in the calibration below, and never
below 2; nothing else is ever widened (a correct kernel that fails has declared the wrong arithmetic, or the bound lacks
a term). `rms` limits judge the root mean square over the elements where there are enough of them for it to mean
something.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

OBSERVABLES = ("out", "logsumexp", "max_logits", "dq", "dk", "dv", "dsinks", "dbias")
DTYPES = ("f32", "bf16", "f16")
RMS_MIN_ELEMENTS = 256
"""With fewer judged elements the root mean square is too close to the maximum to add anything."""

_LIMIT = 4.0
_RMS_LIMIT = 1.5
_SOURCE = "default; see README, Tolerances"


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
    return Tolerances({(d, o): Limit(_LIMIT, _RMS_LIMIT, _SOURCE) for d in DTYPES for o in OBSERVABLES})


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
