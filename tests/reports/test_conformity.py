"""A run that judged little or nothing never reads as conforming."""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Callable

import pytest

from reports import conformity
from reports.page_model import build_summary
from reports.records import (
    DEFAULT_PRECISION,
    ERROR,
    EXPECTED_FAIL,
    FAIL,
    PASS,
    REFUSED,
    UNEXPECTED_PASS,
    UNJUDGED,
    UNSUPPORTED,
    Record,
    RunInfo,
)
from tests.reports.markup import parse_page
from tests.reports.report_samples import (
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


@pytest.mark.parametrize(
    ("verdict", "unasked", "expected"),
    [
        (PASS, ("window_size", "seed"), conformity.IN_PART),
        (EXPECTED_FAIL, ("window_size",), conformity.IN_PART),
        (PASS, ("seed",), conformity.CONFORMS),
        (FAIL, ("window_size",), conformity.DOES_NOT_CONFORM),
        (UNJUDGED, ("window_size",), conformity.NOT_JUDGED),
    ],
)
def test_with_an_operand_that_was_never_called_it_conforms_in_part(
    verdict: str, unasked: tuple[str, ...], expected: str
) -> None:
    assert conformity.compute_conformity([make_record(verdict=verdict)], unasked) == expected


@RENDERERS
def test_every_report_names_what_was_never_called(render: Render) -> None:
    found = [make_record(), make_record(check="gradients", verdict=EXPECTED_FAIL)]
    info = make_run_info(unasked={found[0].implementation: ("window_size", "seed")})
    text = html.unescape(" ".join(render(found, info).split()))
    for part in ("conforms in what was called but for known failures", "with nothing passed to", "never called:"):
        assert part in text.replace("Never", "never")


def test_the_terminal_says_why_nothing_could_be_judged() -> None:
    why = 'the library is not installed: pip install "x"'
    absent = [make_record(implementation="away", verdict=UNJUDGED, ratio=None, reason=why)] * 2
    text = render_terminal([make_record(), *absent], make_run_info())
    assert f"away (cpu): {why}" in text
    assert why not in render_terminal([make_record(implementation="away"), *absent], make_run_info()), (
        "some of it was judged"
    )


def test_a_function_that_supports_no_case_of_a_run_is_said_to_do_so_with_the_reasons() -> None:
    reasons = ["soft_cap: no parameter"] * 3 + ["sinks: no parameter"]
    records = [
        make_record(verdict=UNSUPPORTED, check="support", case=f"{number}", ratio=None, reason=reason)
        for number, reason in enumerate(reasons)
    ]
    text = " ".join(render_terminal(records, make_run_info()).split())
    assert "supports no case" in text
    assert "soft_cap: no parameter (3 cases); sinks: no parameter (1 case)" in text


@RENDERERS
@pytest.mark.parametrize("verdicts", [[], [UNSUPPORTED], [UNJUDGED, UNSUPPORTED]], ids=["empty", "unsupported", "both"])
def test_a_run_that_judged_nothing_never_reads_as_clean(render: Render, verdicts: list[str]) -> None:
    text = render([make_record(verdict=v, ratio=None, reason="no GPU") for v in verdicts], make_run_info())
    assert "could not be judged" in text.lower().replace("\n", " ")
    # The page explains its terms, so only a claim counts: a verdict or the headline.
    assert not re.search(r"cpu\)\**\W+conforms|✓ conforms|None of the", text)
    assert "othing here says that anything is right" in " ".join(text.split())


@RENDERERS
@pytest.mark.parametrize("level", ["quick", "smoke"])
def test_a_narrowed_run_says_to_what(render: Render, level: str) -> None:
    text = " ".join(render([make_record()], make_run_info(narrowed="--check=forward", level=level)).split())
    asked = "smoke, narrowed to --check=forward" if level == "smoke" else "narrowed to --check=forward"
    assert f"passes as far as checked ({asked})" in text
    assert not re.search(r"cpu\)\**\W+conforms|✓ conforms", text)


@RENDERERS
def test_an_interrupted_run_says_so(render: Render) -> None:
    text = " ".join(render([make_record()], make_run_info(interrupted=True)).split())
    assert "passes so far" in text
    assert not re.search(r"cpu\)\**\W+conforms|✓ conforms", text)
    assert "nterrupted" in text


def test_one_check_alone_is_no_conformity() -> None:
    unsupported = [make_record(case=f"case/{i}", verdict=UNSUPPORTED, reason="no causal mask") for i in range(9)]
    alone = build_summary([make_record(), *unsupported], make_run_info()).headline
    assert "conforms" not in alone
    assert "forward" in alone
    assert "1 record" in alone
    assert "conforms" in build_summary([make_record(), make_record(check="gradients")], make_run_info()).headline


def test_what_is_refused_without_a_declaration_is_in_the_verdict() -> None:
    def format_verdict(check: str, refused: int, judged: int = 2) -> str:
        what = {"check": check, "verdict": UNSUPPORTED, "observable": "all", "figures": {REFUSED: 1.0}}
        found = [make_record(case=f"case/{n}", **what) for n in range(refused)]
        right = [make_record(case=f"case/{9 - n}", check=each) for n in range(judged) for each in ("forward", check)]
        return build_summary([*found, *right], make_run_info()).headline

    some = format_verdict("gradients", refused=2)
    assert "refusing 2 of 6 comparisons" in some
    assert "gradients" not in some
    most = format_verdict("gradients", refused=3)
    assert "refusing 3 of 7 comparisons" in most
    assert most.endswith("most of those of gradients.")
    unoffered = make_record(check="gradients_lse", verdict=UNSUPPORTED, observable="all", reason="not offered")
    found = [make_record(), make_record(check="gradients"), unoffered]
    assert build_summary(found, make_run_info()).headline == "block_flash (cpu) conforms."


def test_operands_that_are_declined_together_are_in_the_verdict() -> None:
    found = [make_record(), make_record(check="gradients")]
    rows = [{"implementation": "block_flash (cpu)", "pairs declined": 148, "pairs": 150}]
    format_verdict = build_summary(found, dataclasses.replace(make_run_info(), coverage=rows)).headline
    assert format_verdict == "block_flash (cpu) conforms, declining 148 of 150 pairs of operands and masks."


@RENDERERS
def test_products_at_the_default_precision_are_in_the_verdict(render: Render) -> None:
    unrequested = make_record(check="program", observable="products", figures={DEFAULT_PRECISION: 1.0})
    text = " ".join(render([make_record(), unrequested], make_run_info()).split())
    assert "whose f32 products request no precision (bf16 on a TPU, tf32 on a GPU)" in text
    assert re.search(r"conforms, (whose|with qualifications)", text)
    assert "request no precision" not in render([make_record(), make_record(check="program")], make_run_info())


def test_equal_verdicts_of_several_kernels_are_counted_together() -> None:
    def format_verdicts(*declined: int) -> str:
        names = [f"kernel{number}" for number in range(len(declined))]
        found = [make_record(implementation=name, check=check) for name in names for check in ("forward", "gradients")]
        rows = [
            {"implementation": f"{name} (cpu)", "cases judged": 9, "declined": count}
            for name, count in zip(names, declined, strict=True)
        ]
        return build_summary(found, dataclasses.replace(make_run_info(), coverage=rows)).headline

    assert format_verdicts(3, 3) == "2 implementations: both conform."
    assert format_verdicts(3, 4, 0) == "3 implementations: all conform."


def test_the_heading_of_the_page_is_short_and_said_once() -> None:
    right = [make_record(), make_record(check="gradients")]
    rows = [{"implementation": "block_flash (cpu)", "cases judged": 9, "declined": 3}]
    run = make_run_info(coverage=rows, unasked={"block_flash (cpu)": ("window_size",)})
    page = parse_page(render_html(right, run))
    headings = [one.words for one in page.all("p") if one.attributes.get("class") == "headline"]
    assert headings == [
        f"block_flash (cpu) conforms in what was called. {conformity.CONFORMITY_GLYPHS[conformity.IN_PART]}"
    ]
    (remarks,) = (one for one in page.all("ul") if one.attributes.get("class") == "remarks")
    assert [one.words for one in remarks.all("code")] == ["window_size", "window"]
    assert "judged in 9 cases and declining 3" in remarks.words
    main = page.all("main")[0].words
    assert main.count("conforms in what was called") == main.count("declining 3") == 1


def test_the_heading_says_that_something_was_left_out() -> None:
    found = [make_record(implementation=name, check=check) for name in "ab" for check in ("forward", "gradients")]
    rows = [{"implementation": "b (cpu)", "pairs declined": 148, "pairs": 150}]
    summary = build_summary(found, make_run_info(coverage=rows))
    assert summary.heading == "2 implementations: both conform, with qualifications."
    assert "declining 148 of 150 pairs" in parse_page(render_html(found, make_run_info(coverage=rows))).words
