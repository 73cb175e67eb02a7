"""Define and decode the lines of files of records and of measurements: their fields and types.

A file has one JSON object per line. The field `schema` names the kind of line. A line with unknown fields, missing
fields or fields of another type is refused. Every string is decoded as one printable line. `reports.records`,
`reports.runs` and `reports.measurements` build their objects from decoded lines, and check that the values make
sense.

JSON has no infinities and no NaN. A `Figure` is a number that may be one of them, written as `inf`, `-inf` or `nan`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from reports.error_maps import MAX_CELLS
from reports.printable_text import make_all_printable, may_need_escapes

RECORD_SCHEMA = "attention-conformance/record/1"
RUN_SCHEMA = "attention-conformance/run/2"
JOB_SCHEMA = "attention-conformance/job/1"
END_SCHEMA = "attention-conformance/end/1"
PROBE_SCHEMA = "attention-conformance/probe/1"
MEASUREMENT_SCHEMA = "attention-conformance/measurement/1"

SHARD_PATTERN = r"([1-9]\d{0,3})/([1-9]\d{0,3})"
"""A number of a part and the number of parts, at most 9999: each part that is missing is reported."""

Figure: TypeAlias = int | float | Literal["inf", "-inf", "nan"]
Count: TypeAlias = Annotated[int, Meta(ge=0)]
# The length of an axis. The limit of 2**40 only keeps absurd values out.
Size: TypeAlias = Annotated[int, Meta(ge=0, lt=2**40)]
Cells: TypeAlias = Annotated[str, Meta(max_length=MAX_CELLS, pattern=r"^[-0-9]*\Z")]
CellLines: TypeAlias = Annotated[tuple[Cells, ...], Meta(max_length=MAX_CELLS)]
Axis: TypeAlias = Annotated[str, Meta(pattern=r"^[BTSNKHV]{1,2}\Z")]
# A row of a covering array: one character for each varied axis.
Row: TypeAlias = Annotated[str, Meta(max_length=256)]


class WorstFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of `records.Worst`."""

    index: tuple[int, ...]
    got: Figure
    expected: Figure
    bound: Figure


class ErrorMapFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of `error_maps.ErrorMap`."""

    axes: tuple[Axis, Axis]
    shape: tuple[Size, Size]
    cells: CellLines
    at: tuple[Size, Size] = (0, 0)
    mask: CellLines = ()
    mask_shape: tuple[Size, Size] = (0, 0)
    marks: Cells = ""
    along: Literal["", "T", "S"] = ""
    blocks: tuple[Size, Size] = (0, 0)


class RecordLine(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag=RECORD_SCHEMA):
    """The fields of `records.Record`."""

    implementation: str
    platform: str
    case: str
    check: str
    observable: str
    verdict: str
    dtype: str = ""
    features: tuple[str, ...] = ()
    ratio: Figure | None = None
    rms: Figure | None = None
    ratio_flash: Figure | None = None
    limit: Figure | None = None
    rms_limit: Figure | None = None
    margin: Figure | None = None
    worst: WorstFields | None = None
    reason: str = ""
    remedy: str = ""
    pattern: str = ""
    error_map: ErrorMapFields | None = None
    reproduce: str = ""
    seconds: float = 0.0
    figures: dict[str, Figure] = {}
    files: dict[str, str] = {}
    host: str = ""


class ArrayFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of `runs.CoveringArraySize`."""

    strength: Annotated[int, Meta(ge=1, le=8)]
    combinations: Count


class KernelFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of `runs.Kernel`."""

    package: str = ""
    source: str = ""
    declared: dict[str, Any] = {}
    asks_less: tuple[str, ...] = ()
    block_lengths: tuple[Annotated[int, Meta(ge=1)], ...] = ()
    arrays: tuple[ArrayFields, ...]
    declined: Count = 0
    parted: tuple[Count, Count] = (0, 0)
    place: str = ""
    files: dict[str, str] = {}


class JobFields(Struct, array_like=True, forbid_unknown_fields=True):
    """A planned job, as a list: indices into the run line's `kernels` and `asked`, the case, its covering-array rows.

    `asked` lists the distinct tuples of checks. A case has one row in each covering array, or none.
    """

    kernel: Count
    checks: Count
    case: str
    row: Row | UnsetType = UNSET
    row_of_sizes: Row | UnsetType = UNSET


class QueryFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The query of a run: the options of the command `run` by name, or the arguments of pytest."""

    impl: list[str] | UnsetType = UNSET
    all: bool | UnsetType = UNSET
    level: Literal["smoke", "quick", "standard", "deep"] | UnsetType | None = UNSET
    case: str | UnsetType | None = UNSET
    cases: str | UnsetType | None = UNSET
    regressions: bool | UnsetType = UNSET
    problem: str | UnsetType | None = UNSET
    full_size: bool | UnsetType = UNSET
    check: list[str] | UnsetType = UNSET
    pullback: Literal["plain", "residuals"] | UnsetType | None = UNSET
    seed: list[Count] | UnsetType = UNSET
    products: Literal["exact", "tf32", "bf16"] | UnsetType | None = UNSET
    in_process: bool | UnsetType = UNSET
    timeout: Figure | UnsetType | None = UNSET
    memory: Figure | UnsetType | None = UNSET
    pytest: list[str] | UnsetType = UNSET


class RunLine(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag=RUN_SCHEMA):
    """The fields of `runs.Run`. Jobs name kernels and checks by their indices in `kernels` and `asked`."""

    started: str
    command: str
    level: str
    seeds: tuple[int, ...]
    narrowed: str = ""
    query: QueryFields = msgspec.field(default_factory=QueryFields)
    shard: Annotated[str, Meta(pattern=rf"^({SHARD_PATTERN})?\Z")] = ""
    environment: dict[str, str] = {}
    tolerances: tuple[dict[str, Any], ...]
    kernels: dict[str, KernelFields]
    jobs: tuple[JobFields, ...]
    whole: dict[str, Count] = {}
    resumed: tuple[str, ...]
    id: str = ""
    asked: tuple[tuple[str, ...], ...]


class JobLine(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag=JOB_SCHEMA):
    """The end of a finished job: its index among the planned jobs, and the number of its records before this line."""

    job: Count
    records: Count


class ProbeLine(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag=PROBE_SCHEMA):
    """A record that confirms or refutes a finding."""

    record: RecordLine


class EndLine(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag=END_SCHEMA):
    """The fields of `runs.End`."""

    ended: str
    how: Literal["complete", "interrupted", "failed"]
    reason: str = ""
    jobs: Count = 0
    seconds: float = 0.0


class MeasurementLine(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag=MEASUREMENT_SCHEMA):
    """The fields of `measurements.Measurement`."""

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
    speed: tuple[float, float, float] | None
    flops: float | None = None
    ceiling: float | None = None
    error: Figure | None
    compile_seconds: float | None = None
    memory: dict[str, int | float] = {}
    jax: str = ""


Line: TypeAlias = RecordLine | RunLine | JobLine | ProbeLine | EndLine
_Decoded = TypeVar("_Decoded")

_MEASUREMENT_DECODER = msgspec.json.Decoder(MeasurementLine)
_LINE_DECODER: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def decode_line(text: str) -> Line:
    """Decode a line of a file of records.

    Raises:
      ValueError: if the line fits no schema. The message is one sentence that names the field.
    """
    return _decode(text, _LINE_DECODER)


def decode_measurement(text: str) -> MeasurementLine:
    """Decode a line of a file of measurements.

    Raises:
      ValueError: if the line is not a measurement. The message is one sentence that names the field.
    """
    return _decode(text, _MEASUREMENT_DECODER)


def _decode(text: str, decoder: msgspec.json.Decoder[_Decoded]) -> _Decoded:
    try:
        if may_need_escapes(text):
            return msgspec.convert(make_all_printable(msgspec.json.decode(text)), decoder.type)
        return decoder.decode(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
