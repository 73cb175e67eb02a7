"""The fragment for notebooks shows verdict, findings and chart, stays small, and harms no page that it stands in."""

from __future__ import annotations

import math
import re

import pytest

from reports.html_fragment import MAX_FINDINGS, render_fragment
from reports.page_model import build_summary
from reports.records import ERROR, Diagnosis, Record, SimilarBug
from reports.text_format import TIMES
from tests.reports.markup import parse_page
from tests.reports.report_samples import (
    HOSTILE,
    make_failure,
    make_many,
    make_one_of_each,
    make_record,
    make_run_info,
)


def render(records: list[Record]) -> str:
    return render_fragment(build_summary(records, make_run_info()))


def test_a_fragment_has_the_verdict_the_finding_and_its_command() -> None:
    failure = make_failure(reason="off by one")
    words = parse_page(render([failure, make_record(check="primal")])).words
    for wanted in ("does not conform", failure.case, "max ratio 12, limit 4", "off by one", failure.reproduce):
        assert wanted in words


def test_a_fragment_names_the_planted_bugs_that_a_finding_resembles() -> None:
    failure = make_failure()
    (text,) = build_summary([failure], make_run_info()).findings
    bug = SimilarBug(name="cap-before-bias", family="soft cap", reference="some project", similarity=1.0)
    diagnoses = {text.finding.key: Diagnosis(bugs=(bug,), cases=2, known=800)}
    assert bug.name in parse_page(render_fragment(build_summary([failure], make_run_info(diagnoses=diagnoses)))).words


def test_a_fragment_of_a_kernel_that_conforms_has_no_finding() -> None:
    text = render([make_record(), make_record(check="primal")])
    assert "conforms" in parse_page(text).words
    assert 'class="finding' not in text


def test_a_run_that_judged_nothing_says_so() -> None:
    assert "No record of this run was judged" in render([])


@pytest.mark.parametrize(
    "records",
    [
        make_many(3_000),
        make_one_of_each(),
        [make_failure(case=f"case/{i}" * 400, implementation=f"kernel_{i}", reason="long " * 9_000) for i in range(40)],
        [make_failure(check=f"check-{i}", observable="out" * 300, dtype="f32" * 99) for i in range(60)],
        [make_failure(ratio=figure, check=str(figure)) for figure in (math.inf, math.nan, 0.0, -math.inf)],
    ],
    ids=["many", "one of each", "long texts", "many checks", "odd figures"],
)
def test_a_fragment_is_small_and_well_formed(records: list[Record]) -> None:
    text = render(records)
    assert len(text.encode()) < 60_000
    root = parse_page(text)
    assert len([one for one in root.all("div") if "finding" in one.attributes.get("class", "")]) <= MAX_FINDINGS
    assert not re.search(r"<script|<img|<link|href=|src=|url\(| id=", text)


def test_hostile_text_is_escaped() -> None:
    names = ("implementation", "platform", "case", "check", "observable", "dtype", "reason", "reproduce")
    text = render([make_failure(**dict.fromkeys(names, HOSTILE))])
    assert "<script" not in text
    assert "<img" not in text


def test_every_rule_of_the_style_is_confined_to_the_fragment() -> None:
    (style,) = parse_page(render([make_record()])).all("style")
    selectors = [one for rule in re.findall(r"([^{}]+)\{", style.text) for one in rule.split(",")]
    assert selectors
    assert all(one.strip().startswith(".attention-conformance") for one in selectors)


def test_the_chart_names_what_is_beyond_its_limit_and_what_raised() -> None:
    raised = make_failure(check="gradients", verdict=ERROR, ratio=None)
    root = parse_page(render([make_failure(), make_record(check="primal"), raised]))
    (figure,) = root.all("figure")
    label = figure.all("svg")[0].attributes["aria-label"]
    assert "1 of 3 checks beyond a limit" in label
    assert f"3{TIMES} its limit, in forward f32" in label
    assert "1 red record without a figure" in label
    assert {f"✗ 3{TIMES}", f"0.125{TIMES}", "✗ no figure"} <= {text.words for text in figure.all("text")}
