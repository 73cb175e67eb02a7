"""A folded section says in one line what is inside, and whether anything is wrong there."""

from __future__ import annotations

import math

from reports.page_model import Page, build_page, build_summary
from reports.records import UNJUDGED, UNSUPPORTED, Record, RunInfo
from tests.reports.markup import Element, parse_page
from tests.reports.report_samples import make_failure, make_record, make_run_info, render_html
from tests.reports.test_compiled_section import make_compilation


def build(records: list[Record], run: RunInfo | None = None) -> Page:
    return build_page(build_summary(records, run or make_run_info()))


def test_what_is_wrong_in_a_folded_section_is_said_outside_it() -> None:
    records = [
        make_failure(),
        make_failure(check="gradients", observable="dq", ratio=math.inf),
        make_record(verdict=UNSUPPORTED, reason="no bias", ratio=None),
        make_record(verdict=UNJUDGED, reason="no GPU", ratio=None),
        make_record(case="weak", margin=0.5),
        make_compilation(verdict="error"),
    ]
    folded = build(records).folded
    assert "2 records" in folded["ratios"].wrong
    assert "dq f32" in folded["ratios"].text
    assert "1 record" in folded["gradients"].wrong
    assert "1 case" in folded["discrimination"].doubt
    assert "1 program" in folded["compiled"].wrong
    assert "1 unsupported, 1 unjudged" in folded["reasons"].text
    lines = {
        one.all("h3")[0].attributes["id"]: one.words for one in _list_summaries(render_html(records, make_run_info()))
    }
    assert folded["ratios"].wrong in lines["ratios"]
    assert folded["discrimination"].doubt in lines["discrimination"]


def test_nothing_wrong_is_said_only_where_something_was_judged() -> None:
    fine = build([make_record(), make_record(check="gradients", observable="dq"), make_compilation()])
    assert [name for name, one in fine.folded.items() if one.wrong or one.doubt] == []
    assert {name for name, one in fine.folded.items() if one.is_judged} == {
        *("ratios", "gradients", "discrimination", "compiled")
    }
    assert not any(one.is_judged for one in build([]).folded.values())


def test_eight_sections_hold_every_folded_part() -> None:
    page = build([make_record()])
    text = render_html([make_record()], make_run_info())
    sections = [one for one in parse_page(text).all("section") if one.attributes.get("class") == "part"]
    assert len(sections) <= 8
    folded = [one.all("h3")[0].attributes["id"] for part in sections for one in part.all("summary") if one.all("h3")]
    assert sorted(folded) == sorted(page.folded)


def _list_summaries(page: str) -> list[Element]:
    return [one for one in parse_page(page).all("summary") if one.all("h3")]
