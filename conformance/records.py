"""Records: one judged observable each, the only thing that crosses from running to reporting.

A record is plain data. Files of records are JSON lines, can be appended to, and can be merged from any number of
processes or machines. What holds for a whole run (environment, tolerances, coverage) is a `RunInfo`, kept beside it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SCHEMA = "attention-conformance/record/1"
RUN_SCHEMA = "attention-conformance/run/1"

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
JUDGED = frozenset({PASS, FAIL, EXPECTED_FAIL, UNEXPECTED_PASS})
"""Verdicts that rest on a comparison which took place."""


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
      reproduce: the command that judges this alone.
      seconds: what judging took.
      figures: measured beside the verdict and not judged (`compile_seconds`, `temporary_bytes`, ...). Where rounding
        could change which keys some rows choose, `undecided_rows` of the case's `rows` were left out of the judgement.
        What failed under the flags of the process and was judged again has that ratio as `ratio_fast_compile`, and
        `flags_differ` where JAX's own flags say otherwise.
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
    reproduce: str = ""
    seconds: float = 0.0
    figures: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    schema: str = SCHEMA

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict {self.verdict!r} is none of {', '.join(VERDICTS)}")

    @property
    def key(self) -> tuple[str, ...]:
        """What identifies the judgement; two records with the same key are the same question asked twice."""
        return (self.implementation, self.platform, self.case, self.check, self.observable)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What holds for a whole run.

    `detection` is what the gate is known to catch (`sensitivity.detection`), `declared` what implementations declare
    that asks less of them than the defaults, `few_blocks` how few blocks their lengths allow to ask about
    (`judging.reach`), `narrowed` to what the run was narrowed, as whoever ran it wrote it.
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
    narrowed: str = ""
    schema: str = RUN_SCHEMA


def to_json(record: Record) -> str:
    """One line of strict JSON; infinities and NaN become the strings `inf`, `-inf` and `nan`."""
    data = dataclasses.asdict(record)
    if not data["figures"]:  # most records have none
        del data["figures"]
    return json.dumps(_encode(data), allow_nan=False)


def from_json(line: str) -> Record:
    """The record in a line written by `to_json`. Raises `ValueError` for another schema."""
    data = json.loads(line)
    if not isinstance(data, dict):
        raise ValueError(f"a JSON object is needed, got {type(data).__name__}")
    if data.get("schema") != SCHEMA:
        raise ValueError(f"schema {data.get('schema')!r} is not {SCHEMA!r}")
    for name in ("ratio", "rms", "ratio_flash", "limit", "rms_limit", "margin"):
        data[name] = _number(data.get(name))
    if worst := data.get("worst"):
        figures = {name: _number(worst[name]) for name in ("got", "expected", "bound")}
        data["worst"] = Worst(index=tuple(worst["index"]), **figures)
    data["features"] = tuple(data.get("features", ()))
    data["figures"] = {name: _number(figure) for name, figure in data.get("figures", {}).items()}
    return Record(**data)


def write_jsonl(path: Path, records: Iterable[Record]) -> None:
    """Write records in the order of their keys."""
    path.write_text("".join(to_json(record) + "\n" for record in sorted(records, key=lambda r: r.key)))


def read_jsonl(path: Path) -> list[Record]:
    """Read records; raises `ValueError` naming file and line for one that is not a record."""
    records = []
    try:
        text = path.read_text()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not a file of conformance records: {error.reason} at byte {error.start}"
        ) from error
    for number, line in enumerate(text.splitlines(), 1):
        try:
            records.append(from_json(line))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}:{number} is not a conformance record: {error}") from error
    return records


def merge(*groups: Iterable[Record]) -> list[Record]:
    """All records, the last one winning where two answer the same question, in the order of their keys."""
    merged = {record.key: record for group in groups for record in group}
    return [merged[key] for key in sorted(merged)]


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
