"""Records: one judged observable each, and the only data that cross from judging to reporting.

A record is plain data. Files of records are JSON lines. They can be appended to, and merged from any number of
processes and machines. Lines of other schemas stand between the records: the run record, which jobs are done, and how
the run ended (`conformance.runs`). A `RunInfo` is what a report says of one or several runs, built from these lines
alone.
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

from conformance import output_files
from conformance.error_maps import ErrorMap
from conformance.record_schema import RECORD_SCHEMA, EndLine, JobLine, ProbeLine, RecordLine, RunLine, decode_line

PASS = "pass"
FAIL = "fail"
UNSUPPORTED = "unsupported"
EXPECTED_FAIL = "expected-fail"
UNEXPECTED_PASS = "unexpected-pass"
ERROR = "error"
UNJUDGED = "unjudged"
VERDICTS = (PASS, FAIL, UNSUPPORTED, EXPECTED_FAIL, UNEXPECTED_PASS, ERROR, UNJUDGED)
RED = frozenset({FAIL, UNEXPECTED_PASS, ERROR})
"""Verdicts that make a run not conform."""
RATIO_FAST_COMPILE = "ratio_fast_compile"
"""A figure of a result that was judged again: its ratio under the process's flags, which make compiling cheap."""
FLAGS_DIFFER = "flags_differ"
"""A figure, 1, of a result that is right under one of these sets of flags and wrong under the other."""
DECLARATIONS_TRIED = "declarations_tried"
"""A figure, 1, of a failure for which weaker declarations were tried, whether one explains it or not."""
IN_PROCESS = "in_process"
"""A figure, 1, of a user's kernel that ran in the judge's own process, which it could alter."""
REFUSED = "refused"
"""A figure, 1, of a check that was refused by an exception of the call, and not by a declaration."""
JUDGED = frozenset({PASS, FAIL, EXPECTED_FAIL, UNEXPECTED_PASS})
"""Verdicts that rest on a comparison with the oracle."""
_WORST_FIRST = (FAIL, ERROR, UNEXPECTED_PASS, EXPECTED_FAIL, PASS, UNJUDGED, UNSUPPORTED)

_NUMERIC_FIELDS = ("ratio", "rms", "ratio_flash", "limit", "rms_limit", "margin")
# The fields of a record whose text others may have written.
_TEXT_FIELDS = ("implementation", "case", "check", "observable", "reason", "remedy", "pattern", "reproduce")


_MAX_MESSAGE_LENGTH = 500


class RecordFileError(ValueError):
    """A file is no file of records. The message is one line that names the file, the line and the field."""

    def __init__(self, message: str) -> None:
        line = make_printable(message)
        super().__init__(line if len(line) <= _MAX_MESSAGE_LENGTH else f"{line[:_MAX_MESSAGE_LENGTH]} …")


def make_printable(text: str) -> str:
    """Return text on one line in which every character can be printed.

    White space becomes a space. A character that does not show becomes its Python escape: part of an escape sequence, a
    mark that turns the direction of writing, half a surrogate pair.
    """
    if text.isprintable():
        return text
    return "".join(x if x.isprintable() else " " if x.isspace() else _escape_character(x) for x in text)


def _escape_character(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()


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
      implementation: its name.
      platform: where it was judged.
      case: the case's id.
      check: the name of the check.
      observable: the name of the result that was judged.
      verdict: one of `VERDICTS`.
      dtype: of the operands.
      features: the features of the case.
      ratio: the largest `|got - expected| / bound` over the elements, judged against `limit`. For the check `ensemble`,
        the size of a statistic over many elements, `bias` or `spread` as `observable` says.
      rms: the root mean square of these quotients, judged against `rms_limit` where that is set.
      ratio_flash: for gradients, the same figure as `ratio` against the backward pass recomputed from the
        implementation's own saved `out` and `logsumexp`.
      limit: the limit of `ratio`.
      rms_limit: the limit of `rms`.
      margin: how well the case discriminates: the ratio of the least visible wrong result, in units of the limit.
      worst: the element with the largest ratio.
      reason: why this is the verdict.
      remedy: the declaration under which the check passes on this case, which was tried; for failures.
      pattern: where the error is and what form it has, in words; for failures, empty where no known form fits.
      error_map: the same as a coarse picture; for failures of results that are judged as they are.
      reproduce: the command that judges this alone.
      seconds: the time that judging took.
      figures: numbers that were measured and not judged (`compile_seconds`, `temporary_bytes`, ...). Where rounding
        could change which keys some rows choose, `undecided_rows` of the case's `rows` were left out of the judgement.
        A result that failed under the process's flags and was judged again has that ratio as `ratio_fast_compile`, and
        `flags_differ` if the verdict under JAX's own flags differs. A user's kernel that was judged with `--in-process`
        has `in_process`.
      files: files that the kernel read for the first time during this judgement, with their digests. The run record has
        those that it read when it was loaded.
      run: a label of its run, where merged runs differ; else empty. It is not written, since the record's place in a
        file says of which run it is.
      schema: the schema of the line that the record is written as.
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
        """The identity of the judgement: records with the same key answer the same question."""
        return (self.implementation, self.platform, self.case, self.check, self.observable, self.run)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extent:
    """How many of an implementation's planned jobs were judged, and whether that is all of a level.

    Attributes:
      level: the level of its grid.
      narrowed: the options that narrowed the run, as they were written; empty if none did.
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
        """Whether no run judged some planned jobs."""
        return self.planned is not None and self.done < self.planned

    @property
    def is_whole(self) -> bool:
        """Whether every job of the level was judged; False if unknown, and always False for the level `smoke`."""
        return self.known and not (self.narrowed or self.is_partial or self.stopped or self.level == "smoke")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a report says beside its records, of one run or of several merged runs.

    Mappings are by the label of a contender, or by the name of an implementation.

    Attributes:
      command: the command that repeats the run.
      level: the level of the grid, where there are no `extents`.
      environment: versions, devices and flags.
      tolerances: the limits in force, a row each.
      coverage: what the cases of each grid cover.
      seconds: the time that judging took.
      interrupted: whether the run was stopped, where there are no `extents`.
      notes: lines for the reader.
      detection: what the gate is known to catch (`sensitivity.detection_table`).
      declared: declarations that are weaker than the defaults.
      few_blocks: how few blocks the judged lengths have (`judging.block_coverage`).
      extents: how many of the planned jobs were judged.
      narrowed: the options that narrowed the run, where there are no `extents`.
      probes: records that confirm findings; they are not counted.
      diagnoses: which planted bugs the failures resemble, in words.
      files: the files of contenders that several runs judged.
      runs: what tells those runs from others of the same file (`Run.identity_mark`).
      unsandboxed: whether the kernel ran without a complete sandbox.
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
    diagnoses: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    files: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    runs: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    unsandboxed: dict[str, bool] = dataclasses.field(default_factory=dict)


def serialize_record(record: Record) -> str:
    """Serialize a record to one line of strict JSON; infinities and NaN become the strings `inf`, `-inf`, `nan`."""
    return serialize_strict_json(to_plain_data(record))


def to_plain_data(record: Record) -> dict[str, Any]:
    """Return the JSON object of a record, without its empty optional fields."""
    data = dataclasses.asdict(record)
    del data["run"]
    for name in ("figures", "files", "pattern", "error_map"):  # most records have none
        if not data[name]:
            del data[name]
    return data


def serialize_strict_json(data: Mapping[str, Any]) -> str:
    """Serialize data to one line of strict JSON, infinities and NaN as strings."""
    return json.dumps(_encode_value(dict(data)), allow_nan=False)


def parse_record(line: str) -> Record:
    """Read the record in a line written by `serialize_record`.

    Raises:
      ValueError: for a line that is no record, and for a record that contradicts itself.
    """
    decoded = decode_line(line)
    if not isinstance(decoded, RecordLine):
        raise ValueError(f"the line is of the schema {decoded.__struct_config__.tag!r}, must be of {RECORD_SCHEMA!r}")
    return build_record(decoded)


def build_record(line: RecordLine) -> Record:
    """Build a record from a decoded line.

    Raises:
      ValueError: for an unknown verdict, and for a record that contradicts itself.
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
    """Raise `ValueError` for a record whose fields contradict each other, which the judge cannot have written."""
    for name, value, limit in (("ratio", record.ratio, record.limit), ("rms", record.rms, record.rms_limit)):
        most = sys.float_info.max if limit is None else limit
        if record.verdict == PASS and value is not None and not value <= most:  # NaN is not
            raise ValueError(f"a pass whose {name} is {value:g}, where at most {most:g} is one")
    if (drawn := record.error_map) is not None:
        for name, lines in (("cells", drawn.cells), ("mask", drawn.mask)):
            if len(set(map(len, lines))) > 1:
                raise ValueError(f"the lines of {name} in error_map must have one length")


def write_jsonl(path: Path, records: Iterable[Record]) -> None:
    """Write records in the order of their keys."""
    output_files.write_text(
        path, "".join(serialize_record(record) + "\n" for record in sorted(records, key=lambda r: r.key))
    )


def read_jsonl(path: Path) -> list[Record]:
    """Read the records of a file.

    Raises:
      OSError: if the file cannot be read.
      RecordFileError: for a line that no version of this project wrote.
    """
    lines, _ = read_lines(path)
    return [record for _, record in lines if isinstance(record, Record)]


def read_lines(path: Path) -> tuple[list[tuple[int, Record | RunLine | JobLine | ProbeLine | EndLine]], str]:
    """Read the numbered lines of a file, and return a note if the last line is cut off.

    A process that is killed while it writes leaves part of a line. That line is skipped, and is no error.

    Raises:
      OSError: if the file cannot be read.
      RecordFileError: for any other line that no version of this project wrote.
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
    """Merge records in the order of their keys; of two with the same key, keep the worse one.

    Two runs of the same kernel under the same conditions should agree. If they do not, a pass proves nothing.
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
    if isinstance(value, str):  # half a surrogate pair, as of a path that is not UTF-8, is no Unicode
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    return value


def _parse_number(figure: Any) -> Any:
    return float(figure) if isinstance(figure, str) else figure
