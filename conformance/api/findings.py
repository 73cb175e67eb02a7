"""Turn the findings of a session into plain data for Python callers."""

from __future__ import annotations

import dataclasses
from typing import Any

from conformance.session.run_result import SessionResult
from reports import terminal
from reports.causes.finding_text import FindingText
from reports.records import Diagnosis, Record, Worst


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One cause of failures, with the plainest case that shows it.

    Attributes:
      number: its place in the report, from 1.
      cause: what is wrong, and since which feature, in one sentence.
      sort: `"wrong"`, or `"differs"` if its failures that were judged again pass under declarations.
      declarations: these declarations, as they are written in code, and conventions that need a wrapper in words.
      facts: what else is known of it, a line each.
      case: the id of the plainest case.
      check: the check that failed on it.
      observable: the result that is wrong, such as `out` or `dk`.
      verdict: `fail`, `error` or `unexpected-pass`.
      ratio: the largest error on that case, in units of its bound; None where nothing could be compared.
      limit: the largest ratio that passes.
      worst: the element with the largest ratio: its index, the value, the expected value and the bound.
      pattern: where in the array the error is, in words; empty if it has no known form.
      reason: why the verdict is not `pass`, in words.
      evidence: figures, worst element and pattern as reports print them, a line each.
      failures: how many failed judgements the cause explains.
      diagnosis: the planted bugs that the kernel's results are most like, in `diagnosis.bugs`, which is empty if they
        are like none; None if the finding was not compared with any.
      code: the Python code, or the command, that repeats the judgement of that case.
      text: the finding as the command line prints it, several lines.
    """

    number: int
    cause: str
    sort: str
    declarations: tuple[str, ...]
    facts: tuple[str, ...]
    case: str
    check: str
    observable: str
    verdict: str
    ratio: float | None
    limit: float | None
    worst: Worst | None
    pattern: str
    reason: str
    evidence: tuple[str, ...]
    failures: int
    diagnosis: Diagnosis | None
    code: str
    text: str = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return self.text


def build_findings(result: SessionResult) -> tuple[Finding, ...]:
    """Build the findings of a session, in the order of its report."""
    return tuple(map(_build_finding, result.findings))


def build_record_rows(records: tuple[Record, ...]) -> list[dict[str, Any]]:
    """Build one flat dictionary for each record, as the rows of a table."""
    left_out = {"error_map", "files", "figures", "schema", "worst", "run"}
    fields = [name for name in Record.__struct_fields__ if name not in left_out]
    rows = []
    for record in records:
        row: dict[str, Any] = {name: getattr(record, name) for name in fields}
        worst = record.worst
        row |= {f"worst_{name}": None if worst is None else getattr(worst, name) for name in _WORST_FIELDS}
        rows.append(row)
    return rows


_WORST_FIELDS = Worst.__struct_fields__


def _build_finding(text: FindingText) -> Finding:
    smallest = text.finding.smallest
    return Finding(
        number=text.number,
        cause=text.title,
        sort=text.sort,
        declarations=text.declarations,
        facts=text.facts,
        case=smallest.case,
        check=smallest.check,
        observable=smallest.observable,
        verdict=smallest.verdict,
        ratio=smallest.ratio,
        limit=smallest.limit,
        worst=smallest.worst,
        pattern=smallest.pattern,
        reason=smallest.reason,
        evidence=text.evidence,
        failures=len(text.finding.records),
        diagnosis=text.diagnosis,
        code=smallest.reproduce,
        text=terminal.format_finding(text),
    )
