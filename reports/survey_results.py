"""Summarize the records of published functions for the table of a survey, and keep the summary as plain JSON.

The summary has counts and figures for every feature and dtype, and the records that did not pass.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import statistics
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reports import output_files
from reports.conformity import ImplementationSummary
from reports.matrix_rows import CHECK_KINDS
from reports.printable_text import make_all_printable
from reports.record_groups import group_by, list_record_features
from reports.records import EXPECTED_FAIL, PASS, RED, UNJUDGED, UNSUPPORTED, Record, serialize_strict_json

SCHEMA = "attention-conformance-survey/1"
CALL_CHECKS = (*CHECK_KINDS["arguments"], *CHECK_KINDS["under JAX"])
"""The checks of how a function is called."""
_FINDING = re.compile(r"(?:^|; )expected: finding ([\w.-]+): ")
_MAX_RED = 50  # the most red records of a function that the summary keeps


@dataclasses.dataclass(frozen=True)
class Cell:
    """The records of one feature in one dtype.

    Attributes:
      passed, failed, known, declined, unjudged: numbers of records, by verdict; `known` are expected failures.
      findings: the number of expected failures of each finding; those of no finding are under "".
      reason: the most frequent reason why records were declined or not judged.
      example: the id of the first case that failed, one that is not known to fail if there is any.
    """

    passed: int = 0
    failed: int = 0
    known: int = 0
    declined: int = 0
    unjudged: int = 0
    findings: Mapping[str, int] = dataclasses.field(default_factory=dict)
    reason: str = ""
    example: str = ""


@dataclasses.dataclass(frozen=True)
class Precision:
    """The precision of results that passed, in units of their bounds: of the median record and of the worst one."""

    median: float
    worst: float
    records: int


@dataclasses.dataclass(frozen=True)
class RedRecord:
    """A failure that is not known."""

    case: str
    check: str
    observable: str
    verdict: str
    reason: str
    ratio: float | None


@dataclasses.dataclass(frozen=True)
class FunctionResult:
    """The result of one function of one version of a library.

    Attributes:
      function: its name, as `--impl` takes it.
      platform: the JAX backend.
      conformity: one of the verdicts of `reports.conformity`.
      text: the verdict in words.
      declared: what it declares below the defaults, in words.
      cells: by `feature dtype`.
      precision: by dtype.
      speed: by mask and phase, the seconds of `block_flash` divided by its own: 2 means twice as fast.
      findings: the number of records of each finding; of those without a finding under "".
      finding_features: for each finding, the features that all its records share.
      red: failures that are not known; the first `_MAX_RED` of `red_count`.
    """

    function: str
    platform: str
    conformity: str
    text: str
    declared: str
    cells: Mapping[str, Cell]
    precision: Mapping[str, Precision]
    speed: Mapping[str, float]
    findings: Mapping[str, int]
    finding_features: Mapping[str, tuple[str, ...]]
    red: tuple[RedRecord, ...]
    red_count: int


@dataclasses.dataclass(frozen=True)
class RowResult:
    """The result of one version of a library.

    Attributes:
      library: the name of the library's description.
      package: its name on PyPI.
      version: the version.
      state: `judged`, or why it was not, in one or two words.
      reason: why it was not judged, in a sentence.
      level: the level of the grid.
      started: when it was judged, in UTC.
      environment: versions and the machine.
      functions: the result of each function.
      missing: functions that were not judged.
    """

    library: str
    package: str
    version: str
    state: str
    reason: str
    level: str
    started: str
    environment: Mapping[str, str]
    functions: tuple[FunctionResult, ...]
    missing: tuple[str, ...]


def find_finding(record: Record) -> str:
    """Return the finding that explains an expected failure; "" if the entry names none."""
    found = _FINDING.search(record.reason)
    return found[1] if found is not None else ""


def summarize_function(
    summary: ImplementationSummary,
    records: Sequence[Record],
    declared: Sequence[str] = (),
    speed: Mapping[str, float] | None = None,
) -> FunctionResult:
    """Summarize the records of one function.

    Args:
      summary: the verdict on the function.
      records: its records.
      declared: what it declares below the defaults, in words.
      speed: how fast it was, as `FunctionResult.speed` has it; None if it was not timed.
    """
    keyed = [(f"{feature} {record.dtype}", record) for record in records for feature in list_cell_features(record)]
    cells = {
        key: _build_cell([record for _, record in pairs]) for key, pairs in group_by(keyed, lambda p: p[0]).items()
    }
    red = [record for record in records if record.verdict in RED]
    known = group_by((record for record in records if record.verdict == EXPECTED_FAIL), find_finding)
    by_dtype = group_by((r for r in records if r.verdict == PASS and r.ratio is not None), lambda r: r.dtype)
    return FunctionResult(
        function=summary.implementation.name,
        platform=summary.implementation.platform,
        conformity=summary.conformity,
        text=summary.text,
        declared=", ".join(declared),
        cells=cells,
        precision={dtype: found for dtype, ones in by_dtype.items() if (found := _measure(ones)) is not None},
        speed=dict(speed or {}),
        findings={name: len(ones) for name, ones in sorted(known.items())},
        finding_features={name: _find_common_features(ones) for name, ones in sorted(known.items())},
        red=tuple(RedRecord(r.case, r.check, r.observable, r.verdict, r.reason[:300], r.ratio) for r in red[:_MAX_RED]),
        red_count=len(red),
    )


def list_cell_features(record: Record) -> tuple[str, ...]:
    """List the features in whose cells a record counts.

    A check of how the function is called, such as `transforms`, has a column of its own: its calls have other shapes
    and dtypes than the case that it belongs to.
    """
    return (record.check,) if record.check in CALL_CHECKS else list_record_features(record)


def _find_common_features(records: Iterable[Record]) -> tuple[str, ...]:
    """Return the features that all records share, in order."""
    sets = [frozenset(record.features) for record in records if record.check not in CALL_CHECKS]
    return tuple(sorted(frozenset.intersection(*sets))) if sets else ()


def _build_cell(records: Sequence[Record]) -> Cell:
    verdicts = Counter(record.verdict for record in records)
    reasons = Counter(r.reason for r in records if r.reason and r.verdict in (UNSUPPORTED, UNJUDGED))
    new = [record.case for record in records if record.verdict in RED]
    known = [record.case for record in records if record.verdict == EXPECTED_FAIL and find_finding(record)]
    return Cell(
        passed=verdicts[PASS],
        failed=sum(verdicts[verdict] for verdict in RED),
        known=verdicts[EXPECTED_FAIL],
        declined=verdicts[UNSUPPORTED],
        unjudged=verdicts[UNJUDGED],
        findings=dict(sorted(Counter(find_finding(r) for r in records if r.verdict == EXPECTED_FAIL).items())),
        reason=reasons.most_common(1)[0][0][:200] if reasons else "",
        example=next(iter((*new, *known)), ""),
    )


def _measure(records: Iterable[Record]) -> Precision | None:
    """Measure the precision of records that passed, by their largest ratios."""
    ratios = [
        record.ratio for record in records if record.ratio is not None and record.check in ("forward", "gradients")
    ]
    if not ratios:
        return None
    return Precision(round(statistics.median(ratios), 3), round(max(ratios), 3), len(ratios))


def to_plain_data(rows: Iterable[RowResult]) -> dict[str, Any]:
    """Return the results as data that JSON can hold."""
    return {"schema": SCHEMA, "rows": [dataclasses.asdict(row) for row in rows]}


def write_results(path: Path, rows: Iterable[RowResult]) -> None:
    """Write results as JSON, compressed if the name ends in `.gz`. Raises `OSError` if that fails."""
    text = f"{serialize_strict_json(to_plain_data(rows))}\n"
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
    else:
        output_files.write_text(path, text)


def read_results(path: Path) -> list[RowResult]:
    """Read what `write_results` wrote.

    Raises:
      OSError: if the file cannot be read.
      ValueError: if it holds something else.
    """
    data = path.read_bytes()
    try:
        text = gzip.decompress(data) if path.suffix == ".gz" else data
        return parse_results(make_all_printable(json.loads(text)))
    except (EOFError, zlib.error, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a file of survey results: {error}") from error


def parse_results(data: Mapping[str, Any]) -> list[RowResult]:
    """Parse what `to_plain_data` returns. Raises `ValueError` if the data has another schema."""
    if data.get("schema") != SCHEMA:
        raise ValueError(f"not a file of survey results: schema {data.get('schema')!r}, expected {SCHEMA!r}")
    return [_parse_row(row) for row in data["rows"]]


def _parse_row(row: Mapping[str, Any]) -> RowResult:
    functions = tuple(
        FunctionResult(
            **{
                **one,
                "cells": {key: Cell(**cell) for key, cell in one["cells"].items()},
                "precision": {key: Precision(**figures) for key, figures in one["precision"].items()},
                "finding_features": {name: tuple(words) for name, words in one["finding_features"].items()},
                "red": tuple(RedRecord(**record) for record in one["red"]),
            }
        )
        for one in row["functions"]
    )
    return RowResult(**{**row, "functions": functions, "missing": tuple(row["missing"])})
