"""A history shows since when a contender fails, and draws no run as whole that was not."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
from rich.console import Console

from conformance.records import ERROR, EXPECTED_FAIL, FAIL, PASS, UNJUDGED, UNSUPPORTED, Extent, Record, RunInfo
from reports import history_page, history_tracks
from reports.conformity import summarize_contenders
from reports.history_figure import MAX_RUNS, draw_history, render_history
from reports.history_tracks import RunEntry, RunTrack
from reports.record_groups import group_by_contender
from reports.svg_figure import MUTED

WHOLE = Extent(level="quick", planned=4, done=4)
NARROWED = Extent(level="quick", narrowed="--check=forward", planned=1, done=1)
SMOKE = Extent(level="smoke", planned=4, done=4)
PARTIAL = Extent(level="quick", planned=4, done=2)
STOPPED = Extent(level="quick", planned=4, done=2, stopped=True)
UNKNOWN = Extent(known=False)


def make_record(verdict: str, number: int = 0, name: str = "kernel", **changed: Any) -> Record:
    values: dict[str, Any] = {"platform": "cpu", "check": "forward", "observable": "out", "seconds": 0.5}
    ratio = {PASS: 1.0, FAIL: 40.0}.get(verdict)
    figures = {"ratio": ratio, "limit": 4.0}
    return Record(implementation=name, case=f"case{number}", verdict=verdict, **values | figures | changed)


def make_entry(*verdicts: str, extent: Extent = WHOLE, name: str = "kernel", planned: str = "kernel") -> RunEntry:
    records = [make_record(verdict, number, name) for number, verdict in enumerate(verdicts)]
    info = RunInfo(command="", level=extent.level, environment={}, tolerances=[], extents={f"{name} (cpu)": extent})
    contenders = summarize_contenders(group_by_contender(records), info)
    # One check alone never says that a kernel conforms, so the words are those of a run with a second check.
    several = summarize_contenders(group_by_contender([*records, make_record(PASS, 0, name, check="gradients")]), info)
    contenders = tuple(dataclasses.replace(one, checks=several[0].checks, text=several[0].text) for one in contenders)
    return RunEntry(
        started="2026-01-02T03:04:05+00:00",
        sources=("a",),
        contenders=contenders,
        info=info,
        planned=frozenset({planned}),
    )


def make_track(*entries: RunEntry, changed: tuple[history_tracks.Changed, ...] = ()) -> RunTrack:
    (found,) = history_tracks.build_tracks(entries, lambda earlier, later, name: changed)
    return found


def test_a_point_has_the_figures_of_its_run() -> None:
    (point,) = make_track(make_entry(PASS, FAIL, FAIL, ERROR, UNSUPPORTED, UNJUDGED)).points
    assert (point.failures, point.errors, point.judged, point.unsupported, point.unjudged) == (2, 1, 3, 1, 1)
    assert point.largest == 10.0
    assert point.seconds == 3.0
    assert point.entry.time == "2026-01-02 03:04"


@pytest.mark.parametrize(
    ("extent", "asked", "verdict"),
    [
        (WHOLE, "whole", "conforms"),
        (NARROWED, "narrowed", "passes"),
        (SMOKE, "smoke", "passes"),
        (PARTIAL, "partial", "passes"),
        (STOPPED, "interrupted", "passes"),
        (UNKNOWN, "unknown", "passes"),
    ],
)
def test_only_a_whole_run_says_that_it_conforms_and_is_drawn_so(extent: Extent, asked: str, verdict: str) -> None:
    found = make_track(make_entry(PASS, PASS, extent=extent))
    (point,) = found.points
    assert (point.asked, point.verdict) == (asked, verdict)
    assert ("var(--pass-ink)" in render_history(found)) == (verdict == "conforms")
    page = history_page.render_history_page([found], [point.entry], [])
    assert ('<span class="tag s-pass">' in page) == (verdict == "conforms")


def test_a_failure_is_one_in_any_run_and_hollow_where_the_run_was_not_whole() -> None:
    whole, part = (make_track(make_entry(FAIL, extent=extent)) for extent in (WHOLE, NARROWED))
    assert whole.points[0].verdict == part.points[0].verdict == "does not conform"
    assert "fill: var(--fail-ink)" in render_history(whole)
    assert "fill: var(--fail-ink)" not in render_history(part)
    assert "stroke: var(--fail-ink)" in render_history(part)


def list_lines(found: RunTrack) -> list[list[float]]:
    """List the columns between which a line leads from one largest figure to the next."""
    lines: Any = draw_history(found.points).axes[1].lines
    places = [list(map(float, line.get_xdata())) for line in lines if line.get_color() == MUTED]
    return [place for place in places if len(set(place)) > 1]


def test_lines_lead_from_one_whole_run_to_the_next_and_to_no_other() -> None:
    whole, deep = make_entry(PASS), make_entry(PASS, extent=Extent(level="deep", planned=1, done=1))
    assert list_lines(make_track(whole, whole, whole)) == [[0, 1], [1, 2]]
    assert list_lines(make_track(whole, make_entry(PASS, extent=STOPPED), whole)) == []
    assert list_lines(make_track(whole, deep, deep)) == [[1, 2]]
    elsewhere = make_entry(planned="other")  # a run that was not to judge it
    found = history_tracks.build_tracks([whole, elsewhere, whole], lambda *_: ())
    (kernel,) = (each for each in found if each.contender.implementation == "kernel")
    assert [point.number for point in kernel.points] == [1, 3]
    assert list_lines(kernel) == []


def test_what_was_planned_and_left_no_record_is_there() -> None:
    found = make_track(make_entry(PASS), make_entry())
    assert found.points[1].verdict == "no record"
    assert not found.points[1].is_whole
    assert history_tracks.build_tracks([make_entry()], lambda *_: ())[0].contender.implementation == "kernel"


@pytest.mark.parametrize(
    ("runs", "text"),
    [
        ([(PASS, WHOLE)], "kernel conforms"),
        ([(PASS, WHOLE), (FAIL, WHOLE)], "fails since run 2 (2026-01-02 03:04); run 1 was the last whole run"),
        ([(FAIL, WHOLE), (PASS, WHOLE)], "run 1 (2026-01-02 03:04) was the last that failed"),
        (
            [(FAIL, WHOLE), (PASS, SMOKE)],
            "2026-01-02 03:04), and no whole run after it has conformed",
        ),
        ([(PASS, WHOLE), (FAIL, NARROWED), (PASS, STOPPED), (FAIL, WHOLE)], "fails since run 2"),
        ([(PASS, WHOLE), (FAIL, WHOLE), (EXPECTED_FAIL, WHOLE)], "run 2 (2026-01-02 03:04) was the last that failed"),
        ([(PASS, UNKNOWN), (FAIL, WHOLE)], "fails since run 2 (2026-01-02 03:04); no whole run has conformed before"),
        ([(PASS, SMOKE)], "no whole run has conformed"),
    ],
)
def test_since_when_it_fails(runs: list[tuple[str, Extent]], text: str) -> None:
    found = make_track(*(make_entry(verdict, extent=extent) for verdict, extent in runs))
    text = history_tracks.format_since(found)
    assert text in f"kernel {text}"
    fails = "fails since" in text
    assert (history_tracks.find_failing_since(found) is not None) == fails
    assert (
        "fails." in history_tracks.format_history_headline([found], [point.entry for point in found.points])
    ) == fails


CHANGED = (("commit", "aaa", "bbb"), ("jax", "0.10.2", "0.11.0"), ("limits", "", ""))


def test_what_changed_is_named_everywhere() -> None:
    found = make_track(make_entry(PASS), make_entry(PASS), changed=CHANGED)
    assert found.points[0].changed == ()
    entries = [point.entry for point in found.points]
    console = Console(file=io.StringIO(), width=60)
    history_page.print_history([found], entries, ["a note"], console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "before run 2: commit aaa → bbb; jax 0.10.2 → 0.11.0; limits\n" in text
    assert "a note" in text
    assert "commit bbb, jax 0.11.0 +1" in render_history(found)
    for text in (
        history_page.format_history_markdown([found], entries, ["a note"]),
        history_page.render_history_page([found], entries, ["a note"]),
    ):
        assert "jax 0.10.2 → 0.11.0" in text
        assert "a note" in text


def test_of_very_many_runs_the_newest_are_shown_and_the_others_counted() -> None:
    found = make_track(*[make_entry(PASS)] * 250, changed=CHANGED)
    entries = [point.entry for point in found.points]
    page = history_page.render_history_page([found], entries, [])
    assert "50 earlier runs</b> are not in this table" in page
    assert f"{250 - MAX_RUNS} earlier ones are not drawn" in page
    assert "220 earlier runs are not in this table" in history_page.format_history_markdown([found], entries, [])
    console = Console(file=io.StringIO())
    history_page.print_history([found], entries, [], console)
    assert isinstance(console.file, io.StringIO)
    assert "and 220 earlier runs" in console.file.getvalue()


def test_names_are_text_and_no_markup() -> None:
    name = "<script>|*$x_1$"
    found = make_track(make_entry(PASS, name=name, planned=name))
    page = history_page.render_history_page([found], [found.points[0].entry], ["<b>"])
    assert "<script>" not in page
    assert "<b></li>" not in page
    assert "\\|\\*" in history_page.format_history_markdown([found], [found.points[0].entry], [])


@pytest.mark.long
def test_the_same_runs_give_the_same_page() -> None:
    found = make_track(make_entry(PASS), make_entry(FAIL), changed=CHANGED)
    entries = [point.entry for point in found.points]
    assert history_page.render_history_page([found], entries, []) == history_page.render_history_page(
        [found], entries, []
    )
