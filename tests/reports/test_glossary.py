"""Every check and term on the page has a meaning, from one source, and a link only to a site that there is."""

from __future__ import annotations

import pytest

from conformance.checks import CHECKS
from conformance.judging.run_aggregation import aggregate_runs
from reports import site_links
from reports.glossary import OTHER_ROWS, TERMS, build_glossary
from reports.matrix_rows import CHECK_KINDS
from reports.term_links import mark_terms
from tests.reports.markup import parse_page
from tests.reports.report_samples import HOSTILE, make_failure, make_record, make_run_info, render_html

MEANINGS = {"forward": "Check `out`.", "poison": "Check that NaN reaches no result."}


def test_meanings_of_checks_are_the_first_lines_of_their_docstrings() -> None:
    _, info = aggregate_runs([], command="report")
    assert info.check_meanings == {check.name: check.question for check in CHECKS}
    assert all(info.check_meanings.values())


def test_every_row_of_the_matrix_of_checks_has_a_meaning() -> None:
    rows = [name for names in CHECK_KINDS.values() for name in names]
    meanings = {check.name: check.question for check in CHECKS}
    assert set(build_glossary(rows, meanings).checks) == set(rows)
    assert not set(OTHER_ROWS) & set(meanings)


def test_each_word_of_the_page_leads_to_its_meaning() -> None:
    records = [make_failure(rms=3.0, rms_limit=0.5), make_record(check="poison"), make_record(check="of nobody")]
    root = parse_page(render_html(records, make_run_info(check_meanings=MEANINGS)))
    meanings = {one.attributes["id"]: one.words for one in root.all("dd")}
    words = [one for one in root.all("a") if one.attributes.get("class") == "term"]
    descriptions = {one.attributes["id"]: one.words for one in root.all("span") if "id" in one.attributes}
    for one in words:
        anchor = one.attributes["href"].removeprefix("#")
        assert descriptions[one.attributes["aria-describedby"]] == meanings[anchor]
    assert {"forward", "poison", "ratio", "rms ratio", "max ratio", "bound"} <= {one.words for one in words}
    assert meanings["check-poison"] == MEANINGS["poison"]
    assert meanings["word-poison"] == TERMS["poison"]


def test_a_check_links_to_the_site_only_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not build_glossary(MEANINGS, MEANINGS).checks["forward"].link
    monkeypatch.setattr(site_links, "SITE", "https://docs.example/")
    glossary = build_glossary([*MEANINGS, "support"], MEANINGS)
    assert glossary.checks["forward"].link == "https://docs.example/reference/checks/#forward"
    assert not glossary.checks["support"].link


def test_terms_are_marked_once_in_a_line_and_the_rest_is_escaped() -> None:
    text = str(mark_terms(f"max ratio 3; rms ratio 2; max ratio 4, bound {HOSTILE}", build_glossary([], {})))
    assert [one.text for one in parse_page(text).all("a")] == ["max ratio", "rms ratio", "bound"]
    assert "<script" not in text
    assert parse_page(text).words.startswith("3; 2; max ratio 4,")
