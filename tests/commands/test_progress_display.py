"""The progress display counts what the summary counts."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
from rich.console import Console

from conformance.check_api.judgement import format_distinct
from conformance.commands import progress_display
from reports.metrics import count_verdicts
from reports.records import FAIL, PASS, Record


def record(number: int, verdict: str, **changes: Any) -> Record:
    values: dict[str, Any] = {"implementation": "kernel", "platform": "cpu", "check": "forward", "observable": "out"}
    return Record(case=f"case{number}", verdict=verdict, **values | changes)


def test_progress_counts_jobs_and_red_records_as_the_summary_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_display, "_LINE_INTERVAL_SECONDS", -1.0)
    before = [[record(0, FAIL), record(0, FAIL, observable="dq")], [record(1, PASS)]]
    after = [[record(2, FAIL)], [record(2, FAIL), record(3, PASS)]]  # the second asks something again
    console = Console(file=io.StringIO(), width=200)
    with progress_display.RunProgress(4, console, before) as shown:
        for judged in after:
            shown.advance(judged)
    assert isinstance(console.file, io.StringIO)
    last = console.file.getvalue().splitlines()[-1]
    kept = {one.key: one for judged in [*before, *after] for one in judged}
    assert last.startswith(f"4 of 4 jobs done, {count_verdicts(kept.values()).red} red records")


def test_a_line_comes_while_a_single_job_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_display, "_LINE_INTERVAL_SECONDS", 0.1)
    console = Console(file=io.StringIO(), width=200)
    assert isinstance(console.file, io.StringIO)
    with progress_display.RunProgress(1, console):
        while console.file.getvalue().count("0 of 1 jobs done, 0 red records; still working") < 2:
            time.sleep(0.01)
    printed = console.file.getvalue()
    time.sleep(0.3)
    assert console.file.getvalue() == printed  # nothing comes after the end


def test_a_figure_and_its_limit_look_different_where_they_are() -> None:
    assert format_distinct(4.0000001, 4.0) == ("4.0000001", "4")
    assert format_distinct(221184.0, 4.0) == ("2.21e+05", "4")
    assert format_distinct(4.0, 4.0) == ("4", "4")
