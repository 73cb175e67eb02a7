"""Records: one judged observable each, the only thing that crosses from running to reporting.

A record is plain data. Files of records are JSON lines, can be appended to, and can be merged from any number of
processes or machines. Lines of other schemas stand between them: what holds for a whole run, which jobs are done, how
it ended (`conformance.runs`). What a report says of one run or of several is a `RunInfo`, made of these lines alone.
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

from conformance import error_maps
from conformance.error_maps import ErrorMap

SCHEMA = "attention-conformance/record/1"
RUN_SCHEMA = "attention-conformance/run/2"
JOB_SCHEMA = "attention-conformance/job/1"
END_SCHEMA = "attention-conformance/end/1"
PROBE_SCHEMA = "attention-conformance/probe/1"
_OTHERS = frozenset({RUN_SCHEMA, JOB_SCHEMA, END_SCHEMA, PROBE_SCHEMA})

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
"""The figure of what was judged again: its ratio under the flags of the process, which make compiling cheap."""
FLAGS_DIFFER = "flags_differ"
"""The figure, 1, of what is right under those flags and wrong under JAX's own, or the other way round."""
DECLARATIONS_TRIED = "declarations_tried"
"""The figure, 1, of a failure on which declarations that ask less were tried, whether one explains it or not."""
IN_PROCESS = "in_process"
"""The figure, 1, of what was judged of a user's kernel in the judge's own process, which the kernel could alter."""
REFUSED = "refused"
"""The figure, 1, of a check that was refused by what the call raised, and not by what is declared."""
JUDGED = frozenset({PASS, FAIL, EXPECTED_FAIL, UNEXPECTED_PASS})
"""Verdicts that rest on a comparison which took place."""
_WORST_FIRST = (FAIL, ERROR, UNEXPECTED_PASS, EXPECTED_FAIL, PASS, UNJUDGED, UNSUPPORTED)

# The fields of a record that hold what others may have written.
_WORDS = ("implementation", "case", "check", "observable", "reason", "remedy", "pattern", "reproduce")


def printable(text: str) -> str:
    """Text on one line that no terminal, page or file takes for more than text.

    White space becomes a space. What does not show, such as escape sequences, marks that turn the direction of writing,
    and half a surrogate pair, becomes its escape in Python.
    """
    if text.isprintable():
        return text
    return "".join(x if x.isprintable() else " " if x.isspace() else _escaped(x) for x in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()


@dataclasses.dataclass(frozen=True)
class Worst:
    """The element with the largest ratio: where it is, what came, what was expected, and the error bound there."""

    index: tuple[int, ...]
    got: float
    expected: float
    bound: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One judged observable of one case, or the reason why there is no judgement.

    Attributes:
      implementation: its name.
      platform: where it was judged.
      case: the case's id.
      check: the name of the check.
      observable: which result was judged, by name.
      verdict: one of `VERDICTS`.
      dtype: of the operands.
      features: those of the case.
      ratio: the largest `|got - expected| / bound` over the elements, judged against `limit`. For the check `ensemble`,
        the size of a statistic over many elements, `bias` or `spread` as `observable` says.
      rms: the root mean square of these quotients, judged against `rms_limit` where that is set.
      ratio_flash: for gradients, the same figure as `ratio` against the backward pass recomputed from the
        implementation's own saved `out` and `logsumexp`.
      limit: of `ratio`.
      rms_limit: of `rms`.
      margin: how well the case discriminates: how many times over the limit the least visible null result would fall.
      worst: the element with the largest ratio.
      reason: why this is the verdict.
      remedy: of a failure, the declaration under which its check passes on this case, which was tried.
      pattern: of a failure, where the error is and what form it has, in words; empty where nothing of the list fits.
      error_map: of a failure of a result as it is, the same as a coarse picture.
      reproduce: the command that judges this alone.
      seconds: what judging took.
      figures: measured beside the verdict and not judged (`compile_seconds`, `temporary_bytes`, ...). Where rounding
        could change which keys some rows choose, `undecided_rows` of the case's `rows` were left out of the judgement.
        What failed under the flags of the process and was judged again has that ratio as `ratio_fast_compile`, and
        `flags_differ` where JAX's own flags say otherwise. A user's kernel that was judged with `--in-process` has
        `in_process`.
      files: that the kernel first read while this was judged, with their digests; those that it read as it was loaded,
        the run record has.
      run: what tells its run from others that are merged with it, in words; empty where there is no other. It is not
        written: of which run a record is, its place in the file says.
      schema: of the line that the record is written as.
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
    schema: str = SCHEMA

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict {self.verdict!r} is none of {', '.join(VERDICTS)}")
        for name in _WORDS:
            if isinstance(text := getattr(self, name), str):
                object.__setattr__(self, name, printable(text))

    @property
    def key(self) -> tuple[str, ...]:
        """What identifies the judgement; two records with the same key are the same question asked twice."""
        return (self.implementation, self.platform, self.case, self.check, self.observable, self.run)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extent:
    """How much of what was to be asked of an implementation was asked.

    Attributes:
      level: of its grid.
      narrowed: to what the run was narrowed, as whoever ran it wrote it; empty if it was not.
      planned: how many jobs there were to judge; none where that is not known.
      done: how many of them are judged.
      whole: how many jobs the level has, where a query of cases narrowed them.
      stopped: whether the run was stopped before its end.
      known: whether there is a run record that says so.
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
        """Whether jobs were planned that no run judged."""
        return self.planned is not None and self.done < self.planned

    @property
    def is_whole(self) -> bool:
        """Whether all that a level asks was asked, as far as anybody knows."""
        return self.known and not (self.narrowed or self.is_partial or self.stopped or self.level == "smoke")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a report says beside its records, of one run or of several that are merged.

    `detection` is what the gate is known to catch (`sensitivity.detection`), `declared` what implementations declare
    that asks less of them than the defaults, `few_blocks` how few blocks their lengths allow to ask about
    (`judging.reach`), `extents` how much of each contender was asked. These are kept by the label of a contender, or by
    the name of an implementation; where there is no extent, `level`, `narrowed` and `interrupted` hold for all.
    `probes` is what was judged to confirm findings, which nothing counts, and `diagnoses` what that says in words, by
    the label of a contender: which planted bugs it is wrong most like. `files` names the files of the contenders that
    several runs judged, by their label, and `runs` what tells those from others of the same file (`Run.mark`).
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


def to_json(record: Record) -> str:
    """One line of strict JSON; infinities and NaN become the strings `inf`, `-inf` and `nan`."""
    return strict(to_data(record))


def to_data(record: Record) -> dict[str, Any]:
    """The JSON object of its line."""
    data = dataclasses.asdict(record)
    del data["run"]
    for name in ("figures", "files", "pattern", "error_map"):  # most records have none
        if not data[name]:
            del data[name]
    return data


def strict(data: Mapping[str, Any]) -> str:
    """Data as one line of strict JSON, infinities and NaN as strings."""
    return json.dumps(_encode(dict(data)), allow_nan=False)


def from_json(line: str) -> Record:
    """The record in a line written by `to_json`. Raises `ValueError` for another schema."""
    return from_data(_object(line))


def from_data(data: dict[str, Any]) -> Record:
    """The record in the JSON object of its line. Raises `ValueError` for another schema."""
    if data.get("schema") != SCHEMA:
        raise ValueError(f"schema {data.get('schema')!r} is not {SCHEMA!r}")
    if data.get("run"):
        raise ValueError("a record names no run: the lines around it do")
    for name in ("ratio", "rms", "ratio_flash", "limit", "rms_limit", "margin"):
        data[name] = _number(data.get(name))
    if worst := data.get("worst"):
        figures = {name: _number(worst[name]) for name in ("got", "expected", "bound")}
        data["worst"] = Worst(index=tuple(worst["index"]), **figures)
    if (drawn := data.get("error_map")) is not None:
        data["error_map"] = error_maps.from_data(drawn)
    data["features"] = tuple(data.get("features", ()))
    data["figures"] = {name: _number(figure) for name, figure in dict(data.get("figures", {})).items()}
    record = Record(**data)
    _reject_other_types(record)
    _reject_contradiction(record)
    return record


def _reject_other_types(record: Record) -> None:
    """Refuse a field that the schema knows under another type: whoever reads it later could not say whose it is."""
    numbers = ("ratio", "rms", "ratio_flash", "limit", "rms_limit", "margin", "seconds")
    for name in (*_WORDS, "platform", "dtype"):
        if not isinstance(getattr(record, name), str):
            raise ValueError(f"{name} must be text, got {getattr(record, name)!r}")
    for name in numbers:
        value = getattr(record, name)
        if value is not None and not isinstance(value, int | float):
            raise ValueError(f"{name} must be a number, got {value!r}")
    if record.seconds is None or not all(isinstance(x, int | float) for x in record.figures.values()):
        raise ValueError("seconds and figures must be numbers")
    if not all(isinstance(feature, str) for feature in record.features):
        raise ValueError("features must be text")
    if not all(isinstance(word, str) for word in itertools.chain(*record.files.items())):
        raise ValueError("files and their digests must be text")


def _reject_contradiction(record: Record) -> None:
    """Refuse a pass whose own figures say that it is none, NaN included: nobody here has written it."""
    for name, value, limit in (("ratio", record.ratio, record.limit), ("rms", record.rms, record.rms_limit)):
        most = sys.float_info.max if limit is None else limit
        if record.verdict == PASS and value is not None and not value <= most:
            raise ValueError(f"a pass whose {name} is {value:g}, where at most {most:g} is one")


def write_jsonl(path: Path, records: Iterable[Record]) -> None:
    """Write records in the order of their keys."""
    path.write_text("".join(to_json(record) + "\n" for record in sorted(records, key=lambda r: r.key)))


def read_jsonl(path: Path) -> list[Record]:
    """The records of a file; raises `ValueError` naming file and line for a line that is none and no word of a run."""
    lines, _ = read_lines(path)
    return [record for _, record in lines if isinstance(record, Record)]


def read_lines(path: Path) -> tuple[list[tuple[int, Record | dict[str, Any]]], str]:
    """The numbered lines of a file, those that are no records as JSON objects, and a note of a torn last line.

    A process that was killed while it wrote leaves a last line without its end. That is no error, only no record.

    Raises:
      ValueError: naming file and line for any other line that is not of a schema of ours.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not a file of conformance records: {error.reason} at byte {error.start}"
        ) from error
    found: list[tuple[int, Record | dict[str, Any]]] = []
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        last = number == len(lines)
        if last and not line:
            break
        try:
            data = _object(line)
            found.append((number, data if data.get("schema") in _OTHERS else from_data(data)))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if last and number > 1:
                return found, f"{path.name}: the last line is torn, as if its process was killed while it wrote"
            raise ValueError(f"{path}:{number} is not a conformance record: {error}") from error
    return found, ""


def merge(*groups: Iterable[Record]) -> list[Record]:
    """All records in the order of their keys; where two answer the same question, the worse answer counts.

    Two runs of the same kernel with the same everything should agree. If they do not, a pass proves nothing.
    """
    merged: dict[tuple[str, ...], Record] = {}
    for record in itertools.chain(*groups):
        other = merged.get(record.key)
        if other is None or _WORST_FIRST.index(record.verdict) < _WORST_FIRST.index(other.verdict):
            merged[record.key] = record
    return [merged[key] for key in sorted(merged)]


def _object(line: str) -> dict[str, Any]:
    data = json.loads(line)
    if not isinstance(data, dict):
        raise ValueError(f"a JSON object is needed, got {type(data).__name__}")
    return data


def _encode(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _encode(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value
