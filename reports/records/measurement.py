"""Define measurements: time and memory of one implementation on one case, as plain data for reports.

Timing (`conformance.cost`) writes measurements, and reports read them; neither imports the other. A file of
measurements has one JSON object per line. Lines can be appended, and files of several machines can be merged. A speed
is relative to a baseline that was timed in the same rounds. The speed is stored as it was measured, and is never
computed from samples of two files.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from reports.printable_text import make_printable
from reports.records.record import ERROR, UNJUDGED, UNSUPPORTED, Figure, parse_figures

MEASUREMENT_SCHEMA = "attention-conformance/measurement/1"
FORWARD = "forward"
BACKWARD = "forward+backward"
PHASES = (FORWARD, BACKWARD)
"""The two timed programs: the call; and one program with the call and its gradients."""

AGREES = "agrees"
DIFFERS = "differs"
OUTCOMES = (AGREES, DIFFERS, ERROR, UNSUPPORTED, UNJUDGED)
"""The outcomes of a measurement. A timed program agrees with the float64 oracle or differs from it. The other outcomes
say why a program was not timed.
"""
TIMED = frozenset({AGREES, DIFFERS})
"""Outcomes of programs that were timed. A program whose results have a wrong shape differs and is not timed."""


class Quartiles(NamedTuple):
    """The quartiles of a sample."""

    lower: float
    median: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """Compute quartiles, by linear interpolation between the sorted values.

        Raises:
          ValueError: if there are no values.
        """
        if not values:
            raise ValueError("an empty sample has no quartiles")
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))


class Measurement(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag=MEASUREMENT_SCHEMA
):
    """Time and memory of one implementation on one case in one phase, or the reason why it was not timed.

    Attributes:
      implementation: name of the implementation.
      platform: the JAX backend that it ran on. If it cannot run here, the backend that it is written for.
      device: kind of the device, as JAX names it.
      case: id of the case.
      phase: `"forward"` or `"forward+backward"`.
      outcome: one of `OUTCOMES`.
      reason: why it was not timed, or which results differ from the oracle.
      baseline: name of the implementation that `speed` is relative to.
      samples: seconds per call, one number for each round.
      calls: the number of successive calls in a round; a sample is their mean time.
      speed: quartiles over the rounds of the baseline's seconds divided by this implementation's; 2 means twice as
        fast.
      flops: floating-point operations that the case requires, the same for every implementation
        (`conformance.cost.timing.attention_flops`).
      ceiling: median FLOP/s of a large matrix product in the case's dtype in the same rounds.
      error: the largest error, divided by the limit of the checks, among the elements that were compared.
      compile_seconds: time of tracing, lowering and compiling.
      memory: bytes by name. The compiler reports `temporary`, the temporary buffers, and `peak`, which also counts
        operands and results. `device_peak` is the allocator's high-water mark minus the bytes allocated before. It is
        missing if the device reports no mark, or if an earlier program set the mark.
      jax: version of JAX.
    """

    implementation: str
    platform: str
    device: str
    case: str
    phase: str
    outcome: str
    reason: str = ""
    baseline: str = ""
    samples: tuple[Annotated[float, Meta(gt=0)], ...]
    calls: Annotated[int, Meta(ge=1)] = 1
    speed: Quartiles | None
    flops: float | None = None
    ceiling: float | None = None
    error: Figure | None
    compile_seconds: float | None = None
    memory: Mapping[str, int | float] = {}
    jax: str = ""

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ValueError(f"outcome {self.outcome!r} is none of {', '.join(OUTCOMES)}")
        if self.phase not in PHASES:
            raise ValueError(f"phase {self.phase!r} is none of {', '.join(PHASES)}")
        if bool(self.samples) != (self.outcome in TIMED) and not (self.outcome == DIFFERS and self.reason):
            raise ValueError(f"outcome {self.outcome!r} does not go with {len(self.samples)} samples")
        parse_figures(self, ("error",))
        for name in ("implementation", "case", "reason", "baseline"):
            force_setattr(self, name, make_printable(getattr(self, name)))

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def key(self) -> tuple[str, ...]:
        """The identity of the measurement. Of two measurements with the same key, the later one counts."""
        return (self.device, self.case, self.phase, self.implementation)

    @property
    def seconds(self) -> Quartiles | None:
        """Quartiles of the seconds per call; None if it was not timed."""
        return Quartiles.of(self.samples) if self.samples else None

    @property
    def flops_per_second(self) -> float | None:
        """FLOP/s of the median call; None if it was not timed."""
        return None if self.seconds is None or self.flops is None else self.flops / self.seconds.median

    @property
    def of_ceiling(self) -> float | None:
        """`flops_per_second` as a share of `ceiling`; None if either is not known."""
        reached = self.flops_per_second
        return None if reached is None or not self.ceiling else reached / self.ceiling


def merge_measurements(*groups: Iterable[Measurement]) -> list[Measurement]:
    """Merge measurements in the order of first appearance. Of two with the same key, keep the last one."""
    return list({measurement.key: measurement for group in groups for measurement in group}.values())
