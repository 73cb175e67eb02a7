"""Define records, and read and write files of them. A record holds the verdict on one judged observable.

Records are plain data, and the only data that pass from judging to reporting. A file of records has one JSON object per
line. Lines can be appended, and files of several processes and machines can be merged. Between the records are lines of
other schemas: the run record, the finished jobs, and the end of the run (`reports.runs`). From all these lines a
`RunInfo` is built, which holds everything else that a report shows of one or several runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from reports.error_maps import ErrorMap
from reports.printable_text import make_printable
from reports.record_schema import RECORD_SCHEMA, EndLine, JobLine, ProbeLine, RecordLine, RunLine, decode_line

PASS = "pass"
FAIL = "fail"
UNSUPPORTED = "unsupported"
EXPECTED_FAIL = "expected-fail"
UNEXPECTED_PASS = "unexpected-pass"
ERROR = "error"
UNJUDGED = "unjudged"
VERDICTS = (PASS, FAIL, UNSUPPORTED, EXPECTED_FAIL, UNEXPECTED_PASS, ERROR, UNJUDGED)
RED = frozenset({FAIL, UNEXPECTED_PASS, ERROR})
"""Verdicts with which a run does not conform."""
RATIO_FAST_COMPILE = "ratio_fast_compile"
"""Name of a figure of a result that was judged twice: its ratio under the flags that make compiling cheap."""
FLAGS_DIFFER = "flags_differ"
"""Name of a figure, always 1: the verdict differs between the flags that make compiling cheap and JAX's own flags."""
DECLARATIONS_TRIED = "declarations_tried"
"""Name of a figure, always 1: weaker declarations were tried on this failure, with or without success."""
IN_PROCESS = "in_process"
"""Name of a figure, always 1: a user's kernel ran in the judge's own process, and could have altered the judge."""
REFUSED = "refused"
"""Name of a figure, always 1: the call raised `NotImplementedError`, and no declaration says that it would."""
REFUSED_PRECISION = "refused_precision"
"""Name of a figure, always 1: this platform refuses the precision that a product requests, so nothing was judged."""
DEFAULT_PRECISION = "default_precision"
"""Name of a figure, always 1: f32 products are declared exact, and none of them requests the precision of f32."""
JUDGED = frozenset({PASS, FAIL, EXPECTED_FAIL, UNEXPECTED_PASS})
"""Verdicts that rest on a comparison with the oracle."""
_WORST_FIRST = (FAIL, ERROR, UNEXPECTED_PASS, EXPECTED_FAIL, PASS, UNJUDGED, UNSUPPORTED)

_NUMERIC_FIELDS = ("ratio", "rms", "ratio_flash", "limit", "rms_limit", "margin")
# Fields of a record with text that may come from a kernel or its author.
_TEXT_FIELDS = (
    "implementation",
    "platform",
    "case",
    "check",
    "observable",
    "reason",
    "remedy",
    "pattern",
    "reproduce",
    "host",
)


_MAX_MESSAGE_LENGTH = 500


class RecordFileError(ValueError):
    """A file is not a valid file of records. The message is one line that names the file, the line and the field."""

    def __init__(self, message: str) -> None:
        line = make_printable(message)
        super().__init__(line if len(line) <= _MAX_MESSAGE_LENGTH else f"{line[:_MAX_MESSAGE_LENGTH]} …")


@dataclasses.dataclass(frozen=True)
class Worst:
    """The element with the largest ratio: its index, its value, the expected value and the error bound there."""

    index: tuple[int, ...]
    got: float
    expected: float
    bound: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One judged observable of one case, or the reason why it was not judged.

    Attributes:
      implementation: the name of the implementation.
      platform: the JAX backend on which it was judged.
      case: the id of the case.
      check: the name of the check.
      observable: the name of the result that was judged.
      verdict: one of `VERDICTS`.
      dtype: the dtype of the operands.
      features: the features of the case.
      ratio: the largest `|got - expected| / bound` over the elements, judged against `limit`. For the check `ensemble`,
        the size of a statistic over many elements instead: `bias` or `spread`, which `observable` names.
      rms: the root mean square of `|got - expected| / bound`, judged against `rms_limit` if that is set.
      ratio_flash: for gradients, the largest ratio if the expected value is the backward pass recomputed from the
        implementation's own saved `out` and `logsumexp`. It is shown and not judged.
      limit: the limit of `ratio`.
      rms_limit: the limit of `rms`.
      margin: how well the case discriminates. Of all simple wrong results, the smallest ratio, in units of the limit.
      worst: the element with the largest ratio.
      reason: the reason for the verdict, in words.
      remedy: for failures, a weaker declaration with which the check was seen to pass on this case.
      pattern: for failures, where the error is and which known form it has, in words; empty if no known form fits.
      error_map: for failures, a coarse picture of where the error is. Only results that are compared directly have one.
      reproduce: the command that repeats only this judgement.
      seconds: the time of judging, in seconds.
      figures: numbers that were measured and not judged (`compile_seconds`, `temporary_bytes`, ...). If rounding could
        change which keys some queries select, `undecided_rows` of the case's `rows` were left out of the judgement. A
        result that failed under the flags that make compiling cheap is judged again under JAX's own flags. Then
        `ratio_fast_compile` is the first ratio, and `flags_differ` is present if the verdicts differ. A user's kernel
        that was judged with `--in-process` has `in_process`.
      files: digests of the files that the kernel read for the first time during this judgement. The run record has the
        files that the kernel read when it was loaded.
      host: the host that judged it, if an executor did, such as a cluster; else empty, for the host of the run.
      run: a label of the record's run if runs that differ were merged; else empty. The label is not written to files,
        since the record's position in a file shows its run.
      schema: the name and version of the format in which the record is written.
    """

    implementation: str
    platform: str
    case: str
    check: str
    observable: str
    verdict: str
    dtype: str = ""
    features: tuple[str, ...] = ()
    ratio: float | None = None
    rms: float | None = None
    ratio_flash: float | None = None
    limit: float | None = None
    rms_limit: float | None = None
    margin: float | None = None
    worst: Worst | None = None
    reason: str = ""
    remedy: str = ""
    pattern: str = ""
    error_map: ErrorMap | None = None
    reproduce: str = ""
    seconds: float = 0.0
    figures: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    files: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    host: str = ""
    run: str = ""
    schema: str = RECORD_SCHEMA

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict {self.verdict!r} is none of {', '.join(VERDICTS)}")
        for name in _TEXT_FIELDS:
            if isinstance(text := getattr(self, name), str):
                object.__setattr__(self, name, make_printable(text))

    @property
    def key(self) -> tuple[str, ...]:
        """The identity of the judgement. Records with the same key are judgements of the same observable."""
        return (self.implementation, self.platform, self.case, self.check, self.observable, self.run)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extent:
    """The number of planned and judged jobs of an implementation, and whether these are all jobs of a level.

    Attributes:
      level: the level of its grid.
      narrowed: the options that selected only a part of the level, as the user wrote them; empty if none did.
      planned: the number of planned jobs; None where it is not known.
      done: the number of judged jobs.
      whole: the number of all jobs of the level, if the run selected only some of its cases.
      stopped: whether the run was stopped before its end.
      known: whether a run record holds these values.
    """

    level: str = ""
    narrowed: str = ""
    planned: int | None = None
    done: int = 0
    whole: int | None = None
    stopped: bool = False
    known: bool = True

    @property
    def is_partial(self) -> bool:
        """Whether some planned jobs were not judged."""
        return self.planned is not None and self.done < self.planned

    @property
    def is_whole(self) -> bool:
        """Whether every job of the level was judged; False if unknown, and always False for the level `smoke`."""
        return self.known and not (self.narrowed or self.is_partial or self.stopped or self.level == "smoke")


@dataclasses.dataclass(frozen=True)
class SimilarBug:
    """A planted bug that the failures of a finding resemble.

    Attributes:
      name: the name of the bug.
      family: what the bug is about, such as `soft cap`.
      reference: where a real project had it.
      similarity: from 0 to 1; 1 means wrong by the same numbers in the same places.
    """

    name: str
    family: str
    reference: str
    similarity: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The planted bugs that a finding resembles.

    Attributes:
      bugs: the most similar ones, the first most of all; empty if none is similar.
      cases: how many cases the finding was compared on; 0 if there was no time to compare it, or no case of its kind.
      known: how many planted bugs there are.
      is_shown: whether the finding shows on any of these cases, or could have without the limit of time.
    """

    bugs: tuple[SimilarBug, ...]
    cases: int
    known: int
    is_shown: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Everything that a report shows besides records, for one run or several merged runs.

    Keys of mappings are labels of contenders (an implementation on a platform) or names of implementations.

    Attributes:
      command: the command that repeats the run.
      level: the level of the grid, if `extents` is empty.
      environment: versions, devices and flags.
      tolerances: the limits in force, one row for each.
      coverage: what the cases of each grid cover.
      seconds: the time of judging, in seconds.
      interrupted: whether the run was stopped, if `extents` is empty.
      notes: lines for the reader.
      detection: the planted bugs that each check detects (`sensitivity.detection_table`).
      declared: declarations that are weaker than the defaults.
      few_blocks: warnings that the judged lengths span too few blocks (`judging.block_coverage`).
      extents: how many of the planned jobs were judged.
      narrowed: the options that selected only a part of the level, if `extents` is empty.
      probes: records that confirm findings; they are not counted.
      diagnoses: which planted bugs each finding resembles, by the finding's key.
      files: for contenders that several runs judged, the files of these runs.
      runs: for the same contenders, the marks that identify these runs within their files (`Run.identity_mark`).
      unsandboxed: whether the kernel ran without a complete sandbox.
      check_meanings: what each check tests, in one sentence, by the name of the check.
    """

    command: str
    level: str
    environment: dict[str, str]
    tolerances: list[dict[str, Any]]
    coverage: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    interrupted: bool = False
    notes: list[str] = dataclasses.field(default_factory=list)
    detection: dict[str, Any] | None = None
    declared: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    few_blocks: dict[str, str] = dataclasses.field(default_factory=dict)
    extents: dict[str, Extent] = dataclasses.field(default_factory=dict)
    narrowed: str = ""
    probes: list[Record] = dataclasses.field(default_factory=list)
    diagnoses: dict[tuple[str, ...], Diagnosis] = dataclasses.field(default_factory=dict)
    files: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    runs: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    unsandboxed: dict[str, bool] = dataclasses.field(default_factory=dict)
    check_meanings: dict[str, str] = dataclasses.field(default_factory=dict)


def serialize_record(record: Record) -> str:
    """Serialize a record to one line of strict JSON; infinities and NaN become the strings `inf`, `-inf`, `nan`."""
    return serialize_strict_json(to_plain_data(record))


def to_plain_data(record: Record) -> dict[str, Any]:
    """Return the JSON object of a record, without its empty optional fields."""
    data = dataclasses.asdict(record)
    del data["run"]
    for name in ("figures", "files", "pattern", "error_map", "host"):  # most records have none
        if not data[name]:
            del data[name]
    return data


def serialize_strict_json(data: Mapping[str, Any]) -> str:
    """Serialize data to one line of strict JSON, infinities and NaN as strings."""
    return json.dumps(_encode_value(dict(data)), allow_nan=False)


def parse_record(line: str) -> Record:
    """Read the record in a line written by `serialize_record`.

    Raises:
      ValueError: if the line is not a record, or if the record's fields contradict each other.
    """
    decoded = decode_line(line)
    if not isinstance(decoded, RecordLine):
        raise ValueError(f"the line has the schema {decoded.__struct_config__.tag!r}, must have {RECORD_SCHEMA!r}")
    return build_record(decoded)


def build_record(line: RecordLine) -> Record:
    """Build a record from a decoded line.

    Raises:
      ValueError: if the verdict is unknown, or if the record's fields contradict each other.
    """
    fields = msgspec.structs.asdict(line)
    for name in _NUMERIC_FIELDS:
        fields[name] = _parse_number(fields[name])
    if (worst := line.worst) is not None:
        fields["worst"] = Worst(
            worst.index, _parse_number(worst.got), _parse_number(worst.expected), _parse_number(worst.bound)
        )
    if line.error_map is not None:
        fields["error_map"] = ErrorMap(**msgspec.structs.asdict(line.error_map))
    fields["figures"] = {name: _parse_number(figure) for name, figure in line.figures.items()}
    record = Record(**fields)
    _reject_contradictions(record)
    return record


def _reject_contradictions(record: Record) -> None:
    """Raise `ValueError` if fields of the record contradict each other: the judge cannot have written such a record."""
    for name, value, limit in (("ratio", record.ratio, record.limit), ("rms", record.rms, record.rms_limit)):
        most = sys.float_info.max if limit is None else limit
        if record.verdict == PASS and value is not None and not value <= most:  # NaN is a contradiction too
            raise ValueError(f"a pass whose {name} is {value:g}, which must be at most {most:g}")
    if (drawn := record.error_map) is not None:
        for name, lines in (("cells", drawn.cells), ("mask", drawn.mask)):
            if len(set(map(len, lines))) > 1:
                raise ValueError(f"the lines of {name} in error_map must have one length")


def read_jsonl(path: Path) -> list[Record]:
    """Read the records of a file.

    Raises:
      OSError: if the file cannot be read.
      RecordFileError: if a line is not one that this project writes.
    """
    lines, _ = read_lines(path)
    return [record for _, record in lines if isinstance(record, Record)]


def read_lines(path: Path) -> tuple[list[tuple[int, Record | RunLine | JobLine | ProbeLine | EndLine]], str]:
    """Read the numbered lines of a file, and return a note if the last line is cut off.

    A process that is killed while it writes leaves part of a line. That line is skipped, and is no error.

    Raises:
      OSError: if the file cannot be read.
      RecordFileError: if any other line is not one that this project writes.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecordFileError(
            f"{path} is not a file of conformance records: {error.reason} at byte {error.start}"
        ) from error
    found: list[tuple[int, Record | RunLine | JobLine | ProbeLine | EndLine]] = []
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        last = number == len(lines)
        if last and not line:
            break
        try:
            decoded = decode_line(line)
            found.append((number, build_record(decoded) if isinstance(decoded, RecordLine) else decoded))
        except ValueError as error:
            if last and number > 1:
                return found, f"{path.name}: the last line is torn, as if its process was killed while it wrote"
            remedy = "altered or of another version, so judge again" if number > 1 else "give a file that `run` wrote"
            raise RecordFileError(f"{path}:{number} is not a conformance record: {error} ({remedy})") from error
    return found, ""


def merge_records(*groups: Iterable[Record]) -> list[Record]:
    """Merge records in the order of their keys; of two with the same key, keep the worse verdict.

    Two runs of the same kernel under the same conditions should agree. If one of them fails, the pass of the other
    proves nothing.
    """
    merged: dict[tuple[str, ...], Record] = {}
    for record in itertools.chain(*groups):
        other = merged.get(record.key)
        if other is None or _WORST_FIRST.index(record.verdict) < _WORST_FIRST.index(other.verdict):
            merged[record.key] = record
    return [merged[key] for key in sorted(merged)]


def _encode_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _encode_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):  # a path that is not UTF-8 has lone surrogates, which UTF-8 cannot encode
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    return value


def _parse_number(figure: Any) -> Any:
    return float(figure) if isinstance(figure, str) else figure
