"""The tolerance table: one limit a dtype and observable, in units of the error bound.

The limit is 4 on the largest ratio everywhere, and 1.5 on the root mean square where there are enough elements for it
to mean something. `_REACHED` says what correct implementations came to, which is never more than three quarters of it.
A limit is never widened to make a case pass: a correct kernel that fails has declared the wrong arithmetic, or the
bound lacks a term.
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

# Largest ratio and root mean square over the standard grid with base seeds 0, 1 and 2, on CPU: 170,220 judgements of a
# naive kernel (tests/kernels/naive.py) and of block_flash. Repeat with
#   python -m conformance run --impl=block_flash --level=standard --seed=0 --seed=1 --seed=2 --report=report.html
# whose section "Distance to the limit" has these figures. The bound has grown since, for sums led by one large term, so
# they are upper estimates; max_logits, which it concerns most, was measured again on dot_product's 'huge' cases with
# the same seeds (2.65, 3.39 and 3.66 before). dsinks come in too few elements for a root mean square.
_REACHED: Mapping[tuple[str, str], tuple[float, float]] = {
    ("f32", "out"): (0.93, 0.15),
    ("f32", "logsumexp"): (1.28, 0.22),
    ("f32", "max_logits"): (2.00, 0.60),
    ("f32", "dq"): (1.11, 0.10),
    ("f32", "dk"): (0.88, 0.20),
    ("f32", "dv"): (1.36, 0.41),
    ("f32", "dsinks"): (0.10, 0.00),
    ("f32", "dbias"): (1.35, 0.18),
    ("bf16", "out"): (1.20, 0.30),
    ("bf16", "logsumexp"): (2.01, 0.35),
    ("bf16", "max_logits"): (2.33, 0.67),
    ("bf16", "dq"): (0.83, 0.17),
    ("bf16", "dk"): (0.94, 0.13),
    ("bf16", "dv"): (1.54, 0.34),
    ("bf16", "dsinks"): (0.11, 0.00),
    ("bf16", "dbias"): (1.02, 0.13),
    ("f16", "out"): (0.99, 0.29),
    ("f16", "logsumexp"): (1.75, 0.24),
    ("f16", "max_logits"): (2.62, 0.70),
    ("f16", "dq"): (0.99, 0.14),
    ("f16", "dk"): (2.62, 0.33),
    ("f16", "dv"): (2.07, 0.31),
    ("f16", "dsinks"): (0.18, 0.00),
    ("f16", "dbias"): (1.27, 0.12),
}


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
    return Tolerances({key: Limit(_LIMIT, _RMS_LIMIT, _source(*reached)) for key, reached in _REACHED.items()})


def _source(ratio: float, rms: float) -> str:
    return f"correct kernels reached {ratio:.2f} (rms {rms:.2f}) at standard, three seeds, on CPU"


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
