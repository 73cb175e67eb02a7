"""Findings name the declaration that mends them, and reports name what the compiler's flags decide."""

from __future__ import annotations

import dataclasses

import msgspec

from reports.causes import finding_text, root_causes
from reports.causes.finding import is_mask_leak
from reports.causes.remedies import summarize_mask_leak
from reports.page_model import build_summary
from reports.records import (
    DECLARATIONS_TRIED,
    FAIL,
    FLAGS_DIFFER,
    PASS,
    RATIO_FAST_COMPILE,
    UNSUPPORTED,
    Record,
    RunInfo,
)
from tests.reports.report_samples import render_html, render_markdown, render_terminal

SMALL, LARGE = (f"train/f32/B1.T{t}.S{t}.N2.K2.H16.V16/lengths-5/normal/s0" for t in (8, 64))
FINITE = 'behind_mask="finite"'
RUN = RunInfo(command="run", level="quick", environment={}, tolerances=[])


def make_record(
    verdict: str = PASS, case: str = SMALL, check: str = "forward", observable: str = "out", **more: object
) -> Record:
    made = Record(
        implementation="kernel",
        platform="cpu",
        case=case,
        check=check,
        observable=observable,
        verdict=verdict,
        reproduce=f"python -m conformance run --case={case}",
        ratio=0.5 if verdict == PASS else float("inf"),
        limit=4.0,
    )
    return msgspec.structs.replace(made, **more)


LEAKS = [
    make_record(FAIL, case, "poison", f"{name}.{poison}", remedy=FINITE)
    for case in (LARGE, SMALL)
    for name in ("out", "dq", "dk")
    for poison in ("nan", "inf")
]


def render_texts(records: list[Record], run: RunInfo = RUN) -> dict[str, str]:
    return {
        "terminal": render_terminal(records, run, width=300),
        "markdown": render_markdown(records, run).replace("\\", ""),
        "html": render_html(records, run).replace("&#34;", '"'),
    }


def test_what_lies_behind_the_mask_is_one_finding_everywhere() -> None:
    for name, text in render_texts([*LEAKS, make_record()]).items():
        assert "12 failures in 2 cases (poison); all would pass with the declaration" in text
        assert FINITE in text
        assert SMALL in text
        assert (LARGE in text) == (name == "html")  # where all records are reachable


def test_other_failures_stay_beside_it() -> None:
    other = make_record(FAIL, LARGE, "gradients", "dq")
    assert [is_mask_leak(one) for one in (*LEAKS, other, make_record())] == [True] * len(LEAKS) + [False, False]
    for text in render_texts([*LEAKS, other]).values():
        assert LARGE in text


def test_huge_numbers_behind_the_mask_are_a_failure_of_their_own() -> None:
    huge = make_record(FAIL, check="poison", observable="out.huge")
    assert not is_mask_leak(huge)


def test_a_cache_that_leaks_is_the_same_finding() -> None:
    found = [*LEAKS, make_record(FAIL, check="decoding", observable="out.chunk0", remedy=FINITE)]
    assert all(map(is_mask_leak, found))
    assert summarize_mask_leak(found).checks == ("poison", "decoding")


def test_no_declaration_is_named_that_was_not_seen_to_help() -> None:
    unexplained = [msgspec.structs.replace(leak, remedy="") for leak in LEAKS]
    assert "would pass" not in render_texts(unexplained)["terminal"]
    some = finding_text.format_mask_leak(summarize_mask_leak([*unexplained[1:], LEAKS[0]]))
    assert some.endswith(f"; 1 would pass with the declaration {FINITE}")


def test_a_declaration_that_explains_is_named_with_what_it_explains() -> None:
    narrow = [make_record(FAIL, case, remedy='logits="input"') for case in (SMALL, LARGE)]
    for text in render_texts(narrow).values():
        assert '2 failures in forward would pass with the declaration logits="input"' in text


def test_a_declaration_is_named_that_explains_most_of_what_was_tried() -> None:
    def list_remedies(explained: int, tried: int) -> list[str]:
        remedies = ['logits="input"'] * explained + [""] * (tried - explained)
        found = [make_record(FAIL, SMALL.replace("s0", f"s{n}")) for n in range(20)]
        found += [
            make_record(FAIL, LARGE, observable=f"dq{n}", remedy=remedy, figures={DECLARATIONS_TRIED: 1.0})
            for n, remedy in enumerate(remedies)
        ]
        (finding,) = root_causes.find_root_causes(found)
        return finding_text.format_remedies(finding)

    assert list_remedies(3, 4) == [
        '3 failures of 4 on which it was tried in forward would pass with the declaration logits="input"'
    ]
    assert list_remedies(3, 3) == ['3 failures in forward would pass with the declaration logits="input"']
    assert list_remedies(2, 4) == list_remedies(1, 1) == []


def test_declarations_are_named_together_that_explain_most_and_none_of_them_alone() -> None:
    def list_remedies(*remedies: str) -> list[str]:
        found = [
            make_record(FAIL, LARGE, observable=f"dq{n}", remedy=remedy, figures={DECLARATIONS_TRIED: 1.0})
            for n, remedy in enumerate(remedies)
        ]
        untried = [make_record(FAIL, SMALL.replace("s0", f"s{n}")) for n in range(20)]
        (finding,) = root_causes.find_root_causes([*untried, *found])
        return finding_text.format_remedies(finding)

    logits, softmax, both = 'logits="input"', 'softmax="input"', 'softmax="input", scaled_q=True'
    (line,) = list_remedies(logits, logits, softmax, both, "")
    assert line.startswith(
        f"4 of 5 failures would pass with a declaration: 2 with {logits}; 1 with {softmax}; 1 with {both}."
    )
    assert list_remedies(logits, softmax, "", "") == []  # what is left unexplained may be a bug


def test_why_nothing_was_judged_is_shown_if_all_is_unsupported() -> None:
    found = [make_record(UNSUPPORTED, reason="causal: the function has no parameter 'mask'")]
    assert "kernel (cpu): causal: the function has no parameter 'mask'" in render_texts(found)["terminal"]
    assert "no parameter" not in render_texts([*found, make_record()])["terminal"]


def test_what_flags_decide_is_counted() -> None:
    figures = {RATIO_FAST_COMPILE: 40.0, FLAGS_DIFFER: 1.0}
    for text in render_texts([make_record(figures=figures), make_record(case=LARGE, figures=figures)]).values():
        assert "2 judgements differ by the compiler" in text
        assert SMALL in text
    assert not build_summary([make_record(figures={RATIO_FAST_COMPILE: 40.0})], RUN).flag_differences


def test_the_verdict_says_what_is_declared() -> None:
    run = dataclasses.replace(RUN, declared={"kernel": ['softmax="input"', FINITE]})
    right = [make_record(), make_record(check="gradients")]
    for text in render_texts(right, run).values():
        assert "kernel (cpu) conforms as declared" in text
        assert f'softmax="input", {FINITE}' in text
    assert build_summary([make_record(FAIL)], run).headline == "kernel (cpu) does not conform."
    interrupted = dataclasses.replace(run, interrupted=True)
    assert "passes as declared so far" in build_summary(right, interrupted).headline
    assert build_summary(right, RUN).headline == "kernel (cpu) conforms."
