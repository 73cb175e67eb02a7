"""Every check and term on the page has a meaning, from one source, and a link only to a site that there is."""

from __future__ import annotations

import importlib.metadata
from email.message import Message
from pathlib import Path

import pytest

from conformance.checks import CHECKS
from conformance.judging.run_aggregation import aggregate_runs
from reports import glossary
from reports.glossary import OTHER_ROWS, TERMS, build_glossary, mark_terms
from reports.matrix_rows import CHECK_KINDS
from reports.records import UNSUPPORTED
from tests.reports.markup import parse_page
from tests.reports.report_samples import HOSTILE, make_failure, make_record, make_run_info, render_html

DOCS = Path(__file__).parent.parent.parent / "docs"
MEANINGS = {"forward": "Check `out`.", "poison": "Check that NaN reaches no result."}


def test_meanings_of_checks_are_the_first_lines_of_their_docstrings() -> None:
    _, info = aggregate_runs([], command="report")
    assert info.check_meanings == {check.name: check.about for check in CHECKS}
    assert all(info.check_meanings.values())


def test_every_row_of_the_matrix_of_checks_has_a_meaning() -> None:
    rows = [name for names in CHECK_KINDS.values() for name in names]
    meanings = {check.name: check.about for check in CHECKS}
    assert set(build_glossary(rows, meanings).checks) == set(rows)
    assert not set(OTHER_ROWS) & set(meanings)


def test_what_is_no_check_has_no_name_of_an_option() -> None:
    records = [make_record(check=name, verdict=UNSUPPORTED, ratio=None, reason="none") for name in OTHER_ROWS]
    root = parse_page(render_html(records, make_run_info(check_meanings=MEANINGS)))
    headers = {one.words for one in root.all("th") if one.attributes.get("scope") == "row"}
    assert headers >= {words for words, _ in OTHER_ROWS.values()}
    assert not headers & set(OTHER_ROWS)


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


def test_checks_and_terms_link_to_the_site_only_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glossary, "find_site", lambda: "")
    nowhere = build_glossary(MEANINGS, MEANINGS)
    assert not nowhere.checks["forward"].link
    assert not nowhere.terms["ratio"].link
    monkeypatch.setattr(glossary, "find_site", lambda: "https://docs.example/")
    built = build_glossary([*MEANINGS, "support"], MEANINGS)
    assert built.checks["forward"].link == "https://docs.example/checks.html#forward"
    assert not built.checks["support"].link
    assert all(one.link.startswith("https://docs.example/") for one in built.terms.values())


def test_the_address_of_the_site_is_that_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for lines, site in (
        (["Source, https://code.example", "Documentation, https://docs.example/a"], "https://docs.example/a/"),
        (["Source, https://code.example"], ""),
        ([], ""),
    ):
        stated = Message()
        for line in lines:
            stated.add_header("Project-URL", line)
        monkeypatch.setattr(importlib.metadata, "metadata", lambda _, stated=stated: stated)
        glossary.find_site.cache_clear()
        assert glossary.find_site() == site
    glossary.find_site.cache_clear()


def test_links_to_the_site_lead_to_headings_of_its_pages() -> None:
    places = [f"checks.html#{check.name}" for check in CHECKS] + list(glossary.TERM_PAGES.values())
    for place in places:
        page, _, anchor = place.partition("#")
        text = (DOCS / page).with_suffix(".md").read_text(encoding="utf-8")
        headings = {line.lstrip("# ").lower().replace(" ", "-") for line in text.splitlines() if line.startswith("#")}
        assert not anchor or anchor in headings, place


def test_terms_are_marked_once_in_a_line_and_the_rest_is_escaped() -> None:
    text = str(mark_terms(f"max ratio 3; rms ratio 2; max ratio 4, bound {HOSTILE}", build_glossary([], {})))
    assert [one.text for one in parse_page(text).all("a")] == ["max ratio", "rms ratio", "bound"]
    assert "<script" not in text
    assert parse_page(text).words.startswith("3; 2; max ratio 4,")
