"""The page model groups failures and reasons, and counts rows that were not judged."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from reports.page_model import build_failure_groups, build_page, build_summary
from reports.record_groups import group_by_result
from reports.records import (
    UNJUDGED,
    UNSUPPORTED,
    Record,
    RunInfo,
)
from tests.reports.report_samples import (
    make_failure,
    make_record,
    make_run_info,
    render_html,
    render_markdown,
    render_terminal,
)

RENDERERS = pytest.mark.parametrize(
    "render", [render_html, render_markdown, render_terminal], ids=["html", "md", "terminal"]
)
Render = Callable[[list[Record], RunInfo], str]


def test_every_group_of_failures_is_shown_under_the_cap() -> None:
    noisy = [make_failure(case=f"case/{i}", check="poison") for i in range(900)]
    failures = [*noisy, make_failure(observable="dq", ratio=5.0)]
    groups = build_failure_groups(group_by_result(failures), cap=50)
    assert sorted((g.check, g.shown, g.hidden) for g in groups) == [("forward", 1, 0), ("poison", 49, 851)]


def test_reasons_are_gathered() -> None:
    records = [make_record(verdict=UNSUPPORTED, reason="no bias", case=f"case/{i}") for i in range(5)]
    (group,) = build_page(build_summary([*records, make_record()], make_run_info())).reasons
    assert (group.count, group.reason, group.example) == (5, "no bias", "case/0")


@RENDERERS
def test_rows_that_were_not_judged_are_shown_once_a_case(render: Render) -> None:
    figures = {"undecided_rows": 3, "rows": 140}
    found = [
        *(make_record(case="case/a", observable=name, figures=figures) for name in ("out", "logsumexp")),
        make_record(case="case/b", figures={"undecided_rows": 2, "rows": 60}),
        make_record(case="case/c", verdict=UNJUDGED, figures={"undecided_rows": 9, "rows": 10}),
        make_record(case="case/d"),
    ]
    (rows,) = build_summary(found, make_run_info()).undecided_rows
    assert (rows.cases, rows.rows, rows.of_rows, rows.worst_case) == (2, 5, 200, "case/b")
    assert "5 of 200 rows of 2 cases not judged" in " ".join(render(found, make_run_info()).split())
    assert "rounding could change" not in render([make_record()], make_run_info())
