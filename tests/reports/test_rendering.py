"""Page, Markdown and terminal show what the records say, load nothing, and stay short."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from reports import html_page, page_model
from reports.page_model import build_summary
from reports.records import (
    FAIL,
    RED,
    UNSUPPORTED,
    VERDICTS,
    Record,
    RunInfo,
    Worst,
)
from tests.reports.markup import strip_scripts
from tests.reports.report_samples import (
    HOSTILE,
    make_failure,
    make_many,
    make_one_of_each,
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


def test_the_page_shows_the_sum() -> None:
    page = render_html(make_one_of_each(), make_run_info())
    parts = " + ".join(f"2 {verdict}" for verdict in VERDICTS)
    assert f"{parts} = 14, of 14 records." in page


@RENDERERS
@pytest.mark.parametrize("figure", [math.inf, -math.inf, math.nan, 0.0, 1e-320, 1e308])
def test_any_figure_renders(render: Render, figure: float) -> None:
    worst = Worst(index=(), got=figure, expected=-figure, bound=figure)
    changes = {"ratio": figure, "rms": figure, "rms_limit": 1.0, "ratio_flash": figure, "margin": figure}
    records = [
        make_failure(**changes, worst=worst, observable="dq", check="gradients"),
        make_failure(ratio=3.0, limit=figure),
    ]
    text = strip_scripts(render(records, make_run_info(seconds=figure))).partition('id="words"')[0]
    assert ("NaN" in text) == math.isnan(figure)
    assert "∞" in text or not math.isinf(figure)


@RENDERERS
def test_figures_may_be_missing(render: Render) -> None:
    bare = Record(implementation="", platform="", case="", check="", observable="", verdict=FAIL)
    assert render(
        [bare, make_failure(ratio=None), make_failure(limit=None)],
        make_run_info(level="", environment={}, tolerances=[]),
    )


def test_hostile_text_is_escaped() -> None:
    names = ("implementation", "platform", "case", "check", "observable", "dtype", "reason", "reproduce")
    hostile = dict.fromkeys(names, HOSTILE)
    records = [
        make_failure(**hostile, features=(HOSTILE,)),
        make_record(**hostile | {"verdict": UNSUPPORTED}),
        make_record(**hostile),
    ]
    run = make_run_info(command=HOSTILE, level=HOSTILE, environment={HOSTILE: HOSTILE}, notes=[HOSTILE])
    page = strip_scripts(render_html(records, run))
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page
    summary_text = re.sub(r"`{3,}sh\n.*?\n  `{3,}", "", render_markdown(records, run), flags=re.DOTALL)
    assert "<script" not in summary_text
    assert "<img" not in summary_text
    assert "<script>" in render_terminal(records, run)


def test_a_fence_outlasts_the_backticks_in_it() -> None:
    text = render_markdown([make_failure(reproduce="run ````x````")], make_run_info())
    assert "`````sh\n  run ````x````\n  `````" in text


def test_the_page_loads_nothing() -> None:
    page = render_html([*make_one_of_each(), make_failure(rms=0.2, rms_limit=1.5)], make_run_info())
    assert "http://" not in page
    assert "https://" not in page
    assert "@import" not in page
    assert "<link" not in page
    assert "src=" not in page
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', page))
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))
    assert "default-src 'none'" in page


def test_the_page_is_the_same_twice() -> None:
    records = [*make_one_of_each(), *make_many(300)]
    assert render_html(records, make_run_info()) == render_html(records, make_run_info())


@pytest.mark.long
def test_a_long_run_stays_small(tmp_path: Path) -> None:
    html_page.save_page(tmp_path / "report.html", build_summary(make_many(20_000), make_run_info()))
    assert (tmp_path / "report.html").stat().st_size < 5_000_000


def test_every_red_record_is_reachable_on_the_page() -> None:
    red = [make_failure(case=f"case/{i}", check="poison", observable="dqk"[i % 3]) for i in range(900)]
    page = render_html([*red, make_failure(observable="dq"), *make_many(2_000)], make_run_info())
    assert [
        record.case for record in (*red, *make_many(2_000)) if record.verdict in RED and record.case not in page
    ] == []


def test_what_is_not_there_without_the_script_is_counted() -> None:
    page = render_html([make_failure(case=f"case/{i}") for i in range(900)], make_run_info())
    assert f"{900 - page_model.SHOWN_PER_GROUP} more are in the table of records" in page


@RENDERERS
def test_a_failure_comes_with_what_it_takes_to_act(render: Render) -> None:
    text = render([make_failure(reason="off by one", check="poison")], make_run_info())
    for wanted in ("max ratio 12, limit 4", "0, 3, 1", "got 1.25, expected 1, bound 0.0208", "off by one", "poison"):
        assert wanted in text
    assert (
        make_failure().reproduce in text.splitlines() or "sh\n  " + make_failure().reproduce in text or "<code" in text
    )
    assert make_failure().reproduce in text


def test_the_command_stays_on_one_line_of_the_terminal() -> None:
    command = "python -m conformance run --case=" + "train/" * 40
    assert command in render_terminal([make_failure(reproduce=command)], make_run_info(), width=50).splitlines()


@pytest.mark.parametrize("render", [render_markdown, render_terminal])
def test_short_reports_stay_short(render: Render) -> None:
    text = render(make_many(5_000), make_run_info())
    assert "more" in text
    assert len(text) < 40_000
