"""Turn the records of a job into the outcome of its test: passed, failed, xfailed or skipped."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from reports.records import EXPECTED_FAIL, PASS, RED, UNJUDGED, UNSUPPORTED, Record


def report_outcome(found: Sequence[Record]) -> None:
    """Fail, xfail or skip the running test by the records of its job; return if it passes.

    One red record fails the test. Without any, one expected failure makes it an xfail, whatever else passes. A test
    without a judgement is skipped, and the reasons say why.

    Raises:
      pytest.fail.Exception: for red records; the text describes each.
      pytest.xfail.Exception: for expected failures.
      pytest.skip.Exception: if nothing was judged.
    """
    red = [record for record in found if record.verdict in RED]
    if red:
        pytest.fail("\n".join(describe_failure(record) for record in red), pytrace=False)
    if known := {record.reason for record in found if record.verdict == EXPECTED_FAIL}:
        passed = sum(record.verdict == PASS for record in found)
        others = f" ({passed} other judgements pass)" if passed else ""
        pytest.xfail("; ".join(sorted(known)) + others)
    if any(record.verdict == PASS for record in found):
        return
    reasons = {record.reason for record in found if record.verdict in (UNSUPPORTED, UNJUDGED)}
    pytest.skip("; ".join(sorted(reasons)) or "no check applies to this case")


def describe_failure(record: Record) -> str:
    """Describe one failure: case, observable, worst element, pattern, and the command that repeats it."""
    lines = [
        f"{record.implementation} ({record.platform}): {record.check} {record.observable} {record.verdict}",
        f"  case       {record.case}",
        f"  why        {record.reason}",
    ]
    if record.worst is not None:
        worst = record.worst
        lines.append(
            f"  worst      at {list(worst.index)}: got {worst.got:.9g}, expected {worst.expected:.9g}, "
            f"bound {worst.bound:.3g}, ratio {record.ratio:.3g} (limit {record.limit:g})"
        )
    if record.pattern:
        lines.append(f"  pattern    {record.pattern}")
    return "\n".join([*lines, f"  reproduce  {record.reproduce}"])
