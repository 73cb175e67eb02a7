"""The drawing of an error map has its cells in the page's colours, and no text of a record becomes markup."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from reports.error_map_figure import render_error_map
from reports.records import MAX_CELLS, ErrorMap
from tests.reports.markup import strip_scripts
from tests.reports.report_samples import (
    HOSTILE,
    make_failure,
    make_record,
    make_run_info,
    render_html,
    render_markdown,
    render_terminal,
)

DRAWN = ErrorMap(
    axes=("T", "BN"),
    shape=(256, 2),
    cells=("01", "88"),
    at=(1, 0),
    mask=("10", "21"),
    mask_shape=(256, 256),
    marks="08",
    along="T",
    blocks=(128, 128),
)
WORDS = "only rows from 128 on, a multiple of 128; there zero"


def list_paths(svg: str) -> list[str]:
    """List the paths of a drawing, one for each shade."""
    return [f"{part.get('fill')}@{part.get('fill-opacity')}: {part.get('d')}" for part in parse_svg(svg).iter("path")]


def parse_svg(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def list_panels(drawn: ErrorMap) -> list[str]:
    """List the drawings of an error map, without those of its legend."""
    return re.findall(r'<svg role="img".*?</svg>', render_error_map(drawn))


def test_the_mask_is_drawn_in_the_shade_of_each_row_and_the_cells_beside_it() -> None:
    mask, cells = list_panels(DRAWN)
    assert list_paths(mask)[0] == "var(--pass-ink)@0.16: M0 0h24v24h-24z"
    assert list_paths(mask)[1] == "var(--fail-ink)@1: M0 24h48v24h-48z"
    assert list_paths(cells)[:3] == [
        "var(--pass-ink)@0.16: M0 0h24v24h-24z",
        "var(--pass-ink)@0.34: M24 0h24v24h-24z",
        "var(--fail-ink)@1: M0 24h48v24h-48z",
    ]


def test_a_picture_names_its_axes_and_its_place_for_those_who_do_not_see_it() -> None:
    mask, cells = (parse_svg(panel) for panel in list_panels(DRAWN))
    assert mask.get("aria-label") == "Batch row 1, head 0: who attends to whom, each query shaded by its error"
    assert cells.get("aria-label") == "The largest error by queries and batch rows and heads"
    assert [text.text for text in mask.iter("text")] == ["keys 0 to 255", "queries 0 to 255"]


def test_the_largest_picture_stays_small() -> None:
    checks = tuple("28" * (MAX_CELLS // 2) if y % 2 else "82" * (MAX_CELLS // 2) for y in range(MAX_CELLS))
    marks = "19" * (MAX_CELLS // 2)
    full = ErrorMap(axes=("T", "BN"), shape=(999, 999), cells=checks, mask=checks, marks=marks, along="S")
    assert len(render_error_map(full)) < 32_000


@pytest.mark.parametrize("along", ["T", "S"])
def test_a_picture_that_does_not_agree_with_itself_is_drawn_as_far_as_it_goes(along: str) -> None:
    odd = ErrorMap(axes=("N", "N"), shape=(0, 0), cells=(), mask=("2" * 5,) * 5, marks="3", along=along, blocks=(7, 7))
    assert len(list_panels(odd)) == 1


def test_the_page_shows_the_pattern_and_the_picture_of_a_finding_and_of_each_group() -> None:
    shown = [make_failure(case=f"case/{n}", pattern=WORDS, error_map=DRAWN) for n in range(3)]
    page = strip_scripts(render_html([*shown, make_record()], make_run_info()))
    assert page.count(f"pattern: {WORDS}") == 2
    assert page.count("<summary>where it is wrong</summary>") == 2
    assert page.count('<svg role="img" aria-label="Batch row 1') == 2
    assert "where it is wrong" not in strip_scripts(render_html([make_failure()], make_run_info()))


def test_nothing_of_a_pattern_is_taken_for_markup() -> None:
    page = strip_scripts(render_html([make_failure(pattern=HOSTILE)], make_run_info()))
    assert HOSTILE not in page
    assert "<script" not in page
    text = render_markdown([make_failure(pattern=HOSTILE)], make_run_info())
    assert "<script" not in text


def test_terminal_and_markdown_have_a_line_for_the_pattern() -> None:
    assert f"\n  pattern: {WORDS}\n" in render_terminal([make_failure(pattern=WORDS)], make_run_info(), width=100)
    assert f"pattern: {WORDS}" in render_markdown([make_failure(pattern=WORDS)], make_run_info())
    assert "pattern" not in render_markdown([make_failure()], make_run_info())
