"""The chart shows the figure closest to its limit by check and dtype, and hides no red record."""

from __future__ import annotations

import math

import pytest

from reports.distance_figure import describe_distances, format_row_figure, render_distances
from reports.limit_distances import MAX_CHARTS_BY_CHECK, build_distance_charts
from reports.record_groups import group_records
from reports.records import ERROR, EXPECTED_FAIL, UNSUPPORTED
from reports.text_format import TIMES
from tests.reports.markup import parse_page
from tests.reports.report_samples import HOSTILE, make_failure, make_record


def test_a_row_has_the_worst_figure_of_each_dtype() -> None:
    records = [
        make_record(ratio=1.0),
        make_record(ratio=3.0, case="b"),
        make_record(ratio=0.5, dtype="bf16", rms=0.4, rms_limit=0.5),
        make_failure(check="gradients", ratio=40.0, dtype="f16"),
    ]
    (chart,) = build_distance_charts(group_records(records))
    assert chart.dtypes == ("f32", "bf16", "f16")
    forward, gradients = chart.rows
    assert {dtype: metric.share for dtype, metric in forward.by_dtype.items()} == {"f32": 0.75, "bf16": 0.8}
    assert (gradients.worst is not None and gradients.worst.share, gradients.red) == (10.0, 1)
    assert format_row_figure(forward) == f"0.8{TIMES} rms"
    assert format_row_figure(gradients) == f"✗ 10{TIMES}"


def test_calls_that_raised_are_rows_and_passes_without_a_figure_are_named() -> None:
    records = [
        make_record(check="gradients", verdict=ERROR, ratio=None),
        make_record(check="errors", ratio=None, limit=None),
        make_record(check="support", verdict=UNSUPPORTED, ratio=None),
    ]
    (chart,) = build_distance_charts(group_records(records))
    assert [row.name for row in chart.rows] == ["gradients"]
    assert format_row_figure(chart.rows[0]) == "✗ no figure"
    assert chart.without_figure == ("errors",)
    assert "1 red record without a figure" in describe_distances(chart)


def test_an_expected_failure_does_not_hide_a_near_miss() -> None:
    records = [make_failure(verdict=EXPECTED_FAIL, ratio=99.0), make_record(ratio=3.9, case="b")]
    (chart,) = build_distance_charts(group_records(records))
    assert chart.rows[0].worst is not None
    assert chart.rows[0].worst.value == 3.9


@pytest.mark.parametrize("count", [1, MAX_CHARTS_BY_CHECK, MAX_CHARTS_BY_CHECK + 1, 70])
def test_many_implementations_share_a_chart(count: int) -> None:
    records = [make_record(implementation=f"kernel_{i}") for i in range(count)]
    charts = build_distance_charts(group_records(records))
    if count <= MAX_CHARTS_BY_CHECK:
        assert [chart.noun for chart in charts] == ["check"] * count
    else:
        (chart,) = charts
        assert chart.noun == "implementation"
        assert len(chart.rows) + chart.hidden == count


@pytest.mark.parametrize("ratio", [0.0, 1e-300, 4.0, 1e300, math.inf, math.nan])
def test_marks_stay_within_the_drawing_and_the_description_names_the_largest(ratio: float) -> None:
    records = [make_failure(ratio=ratio, dtype=dtype) for dtype in ("f32", "bf16", "f16", "f8")]
    (chart,) = build_distance_charts(group_records(records))
    svg = parse_page(str(render_distances(chart))).all("svg")[0]
    width = float(svg.attributes["width"])
    marks = [path for path in svg.all("path") if "transform" in path.attributes]
    assert len(marks) == 4
    assert all(0 < float(mark.attributes["transform"].split("(")[1].split()[0]) < width for mark in marks)
    assert len({mark.attributes["d"] for mark in marks}) == 4  # colour alone tells nothing
    assert f"{TIMES} its limit, in forward" in svg.attributes["aria-label"]


def test_hostile_names_are_escaped() -> None:
    (chart,) = build_distance_charts(
        group_records([make_failure(check=HOSTILE, dtype=HOSTILE, implementation=HOSTILE)])
    )
    text = str(render_distances(chart))
    assert "<script" not in text
    assert "<img" not in text


def test_no_figure_at_all_gives_no_chart() -> None:
    assert build_distance_charts(group_records([])) == ()
