"""Measurements: what one implementation costs on one case, the only thing that crosses from timing to reporting.

A measurement is plain data, like a record. Files of measurements are JSON lines, can be appended to, and can be merged
from any number of machines. A speed is relative to a baseline of the same round robin. It is kept as it was measured,
and never recomputed from samples of two files.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from conformance import output_files
from conformance.record_schema import MEASUREMENT_SCHEMA, decode_measurement
from conformance.records import ERROR, UNJUDGED, UNSUPPORTED, RecordFileError, make_printable

FORWARD = "forward"
BACKWARD = "forward+backward"
PHASES = (FORWARD, BACKWARD)
"""The call; the call and its gradients, in one program."""

AGREES = "agrees"
DIFFERS = "differs"
OUTCOMES = (AGREES, DIFFERS, ERROR, UNSUPPORTED, UNJUDGED)
"""Whether the timed program gave what the float64 oracle says where it was looked at; or why there is no timing."""
TIMED = frozenset({AGREES, DIFFERS})
"""Outcomes that go with samples; what differs in its shape has none, since nobody needs to know its speed."""


class Quartiles(NamedTuple):
    """The middle of a sample and where its middle half lies."""

    lower: float
    median: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """Quartiles by linear interpolation between the order statistics; of one value, that value."""
        if not values:
            raise ValueError("there are no quartiles of nothing")
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one implementation costs on one case in one phase, or the reason why it was not timed.

    Attributes:
      implementation: its name.
      platform: the JAX backend it ran on, or that it is written for where it cannot run here.
      device: the kind of device, as JAX names it.
      case: the case's id.
      phase: `"forward"` or `"forward+backward"`.
      outcome: one of `OUTCOMES`.
      reason: why it was not timed, or what differs.
      baseline: the implementation that `speed` is relative to.
      samples: seconds a call, one for each round of the round robin.
      calls: calls in a row that each sample is the mean of.
      speed: quartiles of `baseline's seconds / seconds`, paired round by round; 2 means twice as fast.
      flops: floating-point operations that the case asks for (`conformance.cost.timing.attention_flops`), the same for everybody.
      ceiling: FLOP/s that a large matrix product in the case's dtype reached in the same rounds, by its median.
      error: the largest error over the gate's limit, among the elements that were looked at.
      compile_seconds: tracing, lowering and compiling.
      memory: bytes: `temporary` of the compiled program and `peak`, that with operands and results, as its compiler
        says; `device_peak`, the allocator's high-water mark over what was allocated before, where the device tells and
        this program set it.
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
    samples: tuple[float, ...] = ()
    calls: int = 1
    speed: Quartiles | None = None
    flops: float | None = None
    ceiling: float | None = None
    error: float | None = None
    compile_seconds: float | None = None
    memory: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    jax: str = ""
    schema: str = MEASUREMENT_SCHEMA

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ValueError(f"outcome {self.outcome!r} is none of {', '.join(OUTCOMES)}")
        if self.phase not in PHASES:
            raise ValueError(f"phase {self.phase!r} is none of {', '.join(PHASES)}")
        if bool(self.samples) != (self.outcome in TIMED) and not (self.outcome == DIFFERS and self.reason):
            raise ValueError(f"outcome {self.outcome!r} does not go with {len(self.samples)} samples")
        for name in ("implementation", "case", "reason", "baseline"):
            object.__setattr__(self, name, make_printable(getattr(self, name)))

    @property
    def key(self) -> tuple[str, ...]:
        """What identifies the measurement; of two with one key the later counts."""
        return (self.device, self.case, self.phase, self.implementation)

    @property
    def seconds(self) -> Quartiles | None:
        """Quartiles of the seconds a call, none if it was not timed."""
        return Quartiles.of(self.samples) if self.samples else None

    @property
    def flops_per_second(self) -> float | None:
        """What the median call reaches of `flops`."""
        return None if self.seconds is None or self.flops is None else self.flops / self.seconds.median

    @property
    def of_ceiling(self) -> float | None:
        """`flops_per_second` as a share of `ceiling`."""
        reached = self.flops_per_second
        return None if reached is None or not self.ceiling else reached / self.ceiling


def serialize_measurement(measurement: Measurement) -> str:
    """One line of strict JSON; an infinite error becomes the string `inf`."""
    data = dataclasses.asdict(measurement)
    if data["error"] == float("inf"):
        data["error"] = "inf"
    return json.dumps(data, allow_nan=False)


def parse_measurement(line: str) -> Measurement:
    """Read the measurement in a line written by `to_json`. Raises `ValueError` for a line that is none."""
    fields = msgspec.structs.asdict(decode_measurement(line))
    fields["speed"] = None if fields["speed"] is None else Quartiles(*fields["speed"])
    fields["error"] = None if fields["error"] is None else float(fields["error"])
    return Measurement(**fields)


def has_measurements(path: Path) -> bool:
    """Whether the first line of a file is a measurement."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return f'"{MEASUREMENT_SCHEMA}"' in file.readline()


def read_measurements(path: Path) -> list[Measurement]:
    """Read the measurements of a file.

    Raises:
      OSError: if the file cannot be read.
      RecordFileError: for a line that is no measurement.
    """
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise RecordFileError(f"{path} is not a file of measurements: {error.reason} at byte {error.start}") from error
    for number, line in enumerate(lines, 1):
        try:
            found.append(parse_measurement(line))
        except ValueError as error:
            remedy = "altered or of another version, so measure again"
            raise RecordFileError(f"{path}:{number} is not a measurement: {error} ({remedy})") from error
    return found


def write_measurements(path: Path, measurements: Iterable[Measurement]) -> None:
    """Write measurements in the order given: that of the round robin, the baseline first."""
    output_files.write_text(path, "".join(serialize_measurement(measurement) + "\n" for measurement in measurements))


def merge_measurements(*groups: Iterable[Measurement]) -> list[Measurement]:
    """All measurements, the last one winning where two have one key, in the order of first appearance."""
    return list({measurement.key: measurement for group in groups for measurement in group}.values())
