"""The reports say what the records say: every record counted, nothing loaded from elsewhere, nothing read as clean."""

from __future__ import annotations

import io
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cases.operand_registry import OBSERVABLES
from conformance.records import (
    ERROR,
    EXPECTED_FAIL,
    FAIL,
    PASS,
    RED,
    UNEXPECTED_PASS,
    UNJUDGED,
    UNSUPPORTED,
    VERDICTS,
    Record,
    RunInfo,
    Worst,
)
from reports import conformity, html_page, markdown_summary, matrices, measures, terminal, text_format
from tests.reports.markup import strip_scripts

HOSTILE = '<script>alert("x")</script><img src=https://evil.example/x.png> `</code>` | $\\frac{'


def make_record(**changes: Any) -> Record:
    """A record that passes, but for what is changed."""
    values: dict[str, Any] = {
        "implementation": "block_flash",
        "platform": "cpu",
        "case": "train/f32/B1.T8.S8.N2.K2.H16.V16/causal/normal/s1",
        "check": "forward",
        "observable": "out",
        "verdict": PASS,
        "dtype": "f32",
        "features": ("causal",),
        "ratio": 0.5,
        "limit": 4.0,
        "margin": 1e3,
        "reproduce": "python -m conformance run --case=train/f32/B1.T8.S8.N2.K2.H16.V16/causal/normal/s1",
        "seconds": 0.25,
    }
    return Record(**values | changes)


def make_failure(**changes: Any) -> Record:
    """A record that fails by a factor of three, but for what is changed."""
    worst = Worst(index=(0, 3, 1), got=1.25, expected=1.0, bound=0.0208)
    return make_record(**{"verdict": FAIL, "ratio": 12.0, "worst": worst} | changes)


def make_run_info(**changes: Any) -> RunInfo:
    """What a short, complete run leaves beside its records."""
    values: dict[str, Any] = {
        "command": "python -m conformance run --impl=block_flash",
        "level": "quick",
        "environment": {"jax": "0.10.2"},
        "tolerances": [{"dtype": "f32", "observable": "out", "limit": 4.0, "rms_limit": None, "source": "calibrated"}],
        "coverage": [{"implementation": "block_flash", "strength": 2, "axes": ["dtype", "mask"], "covered": 9}],
        "seconds": 12.5,
    }
    return RunInfo(**values | changes)


def make_one_of_each() -> list[Record]:
    """One record of every verdict, of two implementations."""
    return [
        make_record(implementation=name, verdict=verdict, case=f"case/{verdict}", reason=f"reason of {verdict}")
        for name in ("one", "two")
        for verdict in VERDICTS
    ]


def make_many(count: int) -> list[Record]:
    """Records like those of a long run: mostly passes, with every kind of trouble among them."""
    records = []
    for i in range(count):
        verdict = FAIL if i % 7 == 0 else (UNSUPPORTED if i % 5 == 0 else (ERROR if i % 31 == 0 else PASS))
        records.append(
            make_record(
                implementation=f"kernel_{i % 6}",
                case=f"train/bf16/B2.T{i}.S128.N4.K2.H64.V64/causal/seg/cap30/sinks/normal/s{i}",
                check=("forward", "gradients", "poison", "transforms")[i % 4],
                observable=OBSERVABLES[i % len(OBSERVABLES)],
                dtype=("f32", "bf16", "f16")[i % 3],
                features=("causal", f"feature-{i % 17}"),
                verdict=verdict,
                ratio=None if verdict in (UNSUPPORTED, ERROR) else 0.001 * (i % 3000) + (100 if verdict == FAIL else 0),
                reason=f"reason {i}: " + "word " * 400 if verdict != PASS else "",
            )
        )
    return records


def print_to_text(records: list[Record], run: RunInfo, *, width: int = 60) -> str:
    """What the terminal shows on a narrow screen."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    terminal.print_summary(records, run, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


RENDERERS = pytest.mark.parametrize(
    "render", [html_page.render_page, markdown_summary.format_markdown, print_to_text], ids=["html", "md", "terminal"]
)
Render = Callable[[list[Record], RunInfo], str]


def test_every_record_is_counted_once() -> None:
    records = [*make_one_of_each(), *make_many(500)]
    standings = conformity.build_standings(records)
    assert sum(s.counts.total for s in standings) == conformity.count_verdicts(records).total == len(records)
    assert all(sum(n for _, n in s.counts.parts) == s.counts.total for s in standings)


def test_the_page_shows_the_sum() -> None:
    page = html_page.render_page(make_one_of_each(), make_run_info())
    parts = " + ".join(f"2 {verdict}" for verdict in VERDICTS)
    assert f"{parts} = 14, of 14 records." in page


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([PASS], conformity.CONFORMS),
        ([PASS, UNSUPPORTED, UNJUDGED], conformity.CONFORMS),
        ([PASS, EXPECTED_FAIL, UNSUPPORTED, UNJUDGED], conformity.KNOWN_FAILURES),
        ([PASS, FAIL], conformity.DOES_NOT_CONFORM),
        ([PASS, ERROR], conformity.DOES_NOT_CONFORM),
        ([PASS, UNEXPECTED_PASS], conformity.DOES_NOT_CONFORM),
        ([UNSUPPORTED, UNJUDGED], conformity.NOT_JUDGED),
        ([], conformity.NOT_JUDGED),
    ],
)
def test_conformity(verdicts: list[str], expected: str) -> None:
    assert conformity.compute_conformity([make_record(verdict=verdict) for verdict in verdicts]) == expected


def test_the_terminal_says_why_nothing_could_be_judged() -> None:
    why = 'the library is not installed: pip install "x"'
    absent = [make_record(implementation="away", verdict=UNJUDGED, ratio=None, reason=why)] * 2
    text = print_to_text([make_record(), *absent], make_run_info())
    assert f"away (cpu): {why}" in text
    assert why not in print_to_text([make_record(implementation="away"), *absent], make_run_info()), (
        "some of it was judged"
    )


@RENDERERS
@pytest.mark.parametrize("verdicts", [[], [UNSUPPORTED], [UNJUDGED, UNSUPPORTED]], ids=["empty", "unsupported", "both"])
def test_a_run_that_judged_nothing_never_reads_as_clean(render: Render, verdicts: list[str]) -> None:
    text = render([make_record(verdict=v, ratio=None, reason="no GPU") for v in verdicts], make_run_info())
    assert "could not be judged" in text.lower().replace("\n", " ")
    # The page explains its terms, so only a claim counts: a standing or the headline.
    assert not re.search(r"cpu\)\**\W+conforms|✓ conforms|None of the", text)
    assert "othing here says that anything is right" in " ".join(text.split())


@RENDERERS
@pytest.mark.parametrize("level", ["quick", "smoke"])
def test_a_narrowed_run_says_to_what(render: Render, level: str) -> None:
    text = " ".join(render([make_record()], make_run_info(narrowed="--check=forward", level=level)).split())
    asked = "smoke, narrowed to --check=forward" if level == "smoke" else "narrowed to --check=forward"
    assert f"passes as far as asked ({asked})" in text
    assert not re.search(r"cpu\)\**\W+conforms|✓ conforms", text)


@RENDERERS
def test_an_interrupted_run_says_so(render: Render) -> None:
    text = " ".join(render([make_record()], make_run_info(interrupted=True)).split())
    assert "passes so far" in text
    assert not re.search(r"cpu\)\**\W+conforms|✓ conforms", text)
    assert "nterrupted" in text


@RENDERERS
@pytest.mark.parametrize("figure", [math.inf, -math.inf, math.nan, 0.0, 1e-320, 1e308])
def test_any_figure_renders(render: Render, figure: float) -> None:
    worst = Worst(index=(), got=figure, expected=-figure, bound=figure)
    changes = {"ratio": figure, "rms": figure, "rms_limit": 1.0, "ratio_flash": figure, "margin": figure}
    records = [
        make_failure(**changes, worst=worst, observable="dq", check="gradients"),
        make_failure(ratio=3.0, limit=figure),
    ]
    text = strip_scripts(render(records, make_run_info(seconds=figure)))
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
    page = strip_scripts(html_page.render_page(records, run))
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page
    summary_text = re.sub(r"`{3,}sh\n.*?\n  `{3,}", "", markdown_summary.format_markdown(records, run), flags=re.DOTALL)
    assert "<script" not in summary_text
    assert "<img" not in summary_text
    assert "<script>" in print_to_text(records, run)


def test_a_fence_outlasts_the_backticks_in_it() -> None:
    text = markdown_summary.format_markdown([make_failure(reproduce="run ````x````")], make_run_info())
    assert "`````sh\n  run ````x````\n  `````" in text


def test_the_page_loads_nothing() -> None:
    page = html_page.render_page([*make_one_of_each(), make_failure(rms=0.2, rms_limit=1.5)], make_run_info())
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
    assert html_page.render_page(records, make_run_info()) == html_page.render_page(records, make_run_info())


@pytest.mark.long
def test_a_long_run_stays_small_and_quick(tmp_path: Path) -> None:
    records = make_many(20_000)

    def seconds() -> float:
        start = time.process_time()
        html_page.save_page(tmp_path / "report.html", records, make_run_info())
        return time.process_time() - start

    # Whoever else is on the machine may slow one of them.
    assert any(seconds() < 10 for _ in range(3))
    assert (tmp_path / "report.html").stat().st_size < 5_000_000


def test_every_group_of_failures_is_shown_under_the_cap() -> None:
    noisy = [make_failure(case=f"case/{i}", check="poison") for i in range(900)]
    groups = conformity.group_failures([*noisy, make_failure(observable="dq", ratio=5.0)], cap=50)
    assert sorted((g.check, g.shown, g.hidden) for g in groups) == [("forward", 1, 0), ("poison", 49, 851)]


def test_every_red_record_is_reachable_on_the_page() -> None:
    red = [make_failure(case=f"case/{i}", check="poison", observable="dqk"[i % 3]) for i in range(900)]
    page = html_page.render_page([*red, make_failure(observable="dq"), *make_many(2_000)], make_run_info())
    assert [
        record.case for record in (*red, *make_many(2_000)) if record.verdict in RED and record.case not in page
    ] == []


def test_what_is_not_there_without_the_script_is_counted() -> None:
    page = html_page.render_page([make_failure(case=f"case/{i}") for i in range(900)], make_run_info())
    assert f"{900 - html_page.SHOWN_WITHOUT_SCRIPT} more: in the table of records" in page


@RENDERERS
def test_a_failure_comes_with_what_it_takes_to_act(render: Render) -> None:
    text = render([make_failure(reason="off by one", check="poison")], make_run_info())
    for wanted in ("max ratio 12, limit 4", "0, 3, 1", "got 1.25, expected 1, bound 0.0208", "off by one", "poison"):
        assert wanted in text
    assert (
        make_failure().reproduce in text.splitlines() or "sh\n  " + make_failure().reproduce in text or "<code" in text
    )
    assert make_failure().reproduce in text


def test_what_is_displayed_is_what_was_judged() -> None:
    by_rms = make_failure(ratio=3.0, limit=4.0, rms=2.0, rms_limit=0.5)
    metric = conformity.find_decisive_metric(by_rms)
    assert metric is not None
    assert (metric.name, metric.share) == ("rms", 4.0)
    assert text_format.format_judged(by_rms) == "max ratio 3, limit 4; rms ratio 2, limit 0.5"
    assert conformity.find_decisive_metric(make_failure(ratio=1.0, rms=9.0, ratio_flash=99.0)) == conformity.Metric(
        "max", 1.0, 4.0
    )


def test_close_calls_do_not_look_equal() -> None:
    close = conformity.Metric("max", 4.0001, 4.0)
    assert text_format.metric_text(close) == "max ratio 4.0001, limit 4"
    assert text_format.share(close.share) != text_format.share(1.0)


@pytest.mark.parametrize(("value", "share"), [(0.0, 0.0), (1e-30, math.inf), (math.inf, math.inf)])
def test_a_limit_of_zero_admits_only_zero(value: float, share: float) -> None:
    assert conformity.Metric("max", value, 0.0).share == share


def test_nan_is_worse_than_anything() -> None:
    records = [make_failure(ratio=1e30), make_failure(ratio=math.nan), make_record()]
    worst = conformity.find_worst_metric(records)
    assert worst is not None
    assert math.isnan(worst.value)


def test_expected_failures_do_not_hide_the_worst_of_the_rest() -> None:
    expected = make_record(verdict=EXPECTED_FAIL, ratio=400.0)
    assert conformity.find_worst_metric([expected, make_record(ratio=3.0)]) == conformity.Metric("max", 3.0, 4.0)
    assert conformity.find_worst_metric([expected]) == conformity.Metric("max", 400.0, 4.0)


def test_features_have_a_fixed_order_by_kind_and_lose_no_record() -> None:
    records = [
        make_record(features=("sinks", "causal")),
        make_record(features=()),
        make_record(features=("bias", "sinks")),
    ]
    matrix = matrices.build_feature_matrix(records)
    assert matrix.groups == (
        ("mask", ("causal",)),
        ("operands", ("sinks", "bias")),
        ("others", (matrices.NO_FEATURE,)),
    )
    assert matrix.cells[matrix.contenders[0], "sinks"].counts.total == 2


def test_the_matrix_tells_unsupported_from_unjudged() -> None:
    records = [
        make_record(features=("bias",), verdict=UNSUPPORTED, reason="no bias operand"),
        make_record(features=("sinks",), verdict=UNJUDGED, reason="no GPU"),
        make_record(features=("causal",)),
        make_record(features=("causal",), verdict=UNSUPPORTED),
    ]
    matrix = matrices.build_feature_matrix(records)
    states = {feature: matrix.cells[matrix.contenders[0], feature].state for feature in matrix.columns}
    assert states == {"bias": "unsupported", "sinks": "unjudged", "causal": "pass"}
    assert 'title="no bias operand"' in html_page.render_page(records, make_run_info())


def test_reasons_are_gathered() -> None:
    records = [make_record(verdict=UNSUPPORTED, reason="no bias", case=f"case/{i}") for i in range(5)]
    (group,) = conformity.group_reasons([*records, make_record()])
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
    (left_out,) = conformity.find_undecided_rows(found)
    assert (left_out.cases, left_out.rows, left_out.of_rows, left_out.worst_case) == (2, 5, 200, "case/b")
    assert "5 of 200 rows of 2 cases not judged" in " ".join(render(found, make_run_info()).split())
    assert "rounding could change" not in render([make_record()], make_run_info())


def test_gradients_show_both_backwards() -> None:
    records = [
        make_record(observable="dq", ratio=2.0, ratio_flash=1.5),
        make_record(observable="dq", ratio=1.0, ratio_flash=3.0),
    ]
    table = measures.build_gradient_table([*records, make_record()])
    (cell,) = table.cells.values()
    assert (cell.count, cell.ratio, cell.ratio_flash) == (2, 2.0, 3.0)


def test_a_margin_counts_each_case_once_by_its_weakest() -> None:
    records = [
        make_record(case="a", margin=50.0),
        make_record(case="a", margin=0.5),
        make_record(case="b", margin=math.inf),
    ]
    (row,) = measures.build_margins(records)
    assert (row.cases, row.least, row.weakest_case, row.buckets) == (2, 0.5, "a", (1, 0, 0, 0, 1))


def test_quantiles_are_values_that_occurred() -> None:
    spread = measures.compute_spread([3.0, math.nan, 1.0, 2.0])
    assert (spread.least, spread.median) == (1.0, 2.0)
    assert math.isnan(spread.most)


def test_cost_adds_up() -> None:
    records = make_many(100)
    table = measures.build_cost_table(records)
    # Tolerance: sums of as many positive numbers as there are records, each with as many roundings at most.
    rounding = 2 * len(records) * 2.0**-53
    # Tolerance: as above.
    assert table.total == pytest.approx(sum(r.seconds for r in records), rel=rounding, abs=0)
    # Tolerance: as above.
    assert sum(table.row(check) for check in table.checks) == pytest.approx(table.total, rel=rounding, abs=0)


def test_the_command_stays_on_one_line_of_the_terminal() -> None:
    command = "python -m conformance run --case=" + "train/" * 40
    assert command in print_to_text([make_failure(reproduce=command)], make_run_info(), width=50).splitlines()


@pytest.mark.parametrize("render", [markdown_summary.format_markdown, print_to_text])
def test_short_reports_stay_short(render: Render) -> None:
    text = render(make_many(5_000), make_run_info())
    assert "more" in text
    assert len(text) < 40_000
