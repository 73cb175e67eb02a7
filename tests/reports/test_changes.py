"""In a comparison of two runs, what became worse is a regression, and nothing else is."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from rich.console import Console

from reports import changes, changes_page
from reports.changes import (
    FIXED,
    GONE,
    NEW_FAILURE,
    NEWLY_EXPECTED,
    NEWLY_JUDGED,
    NEWLY_UNJUDGED,
    NEWLY_UNSUPPORTED,
    NOT_JUDGED_AGAIN,
    Comparison,
)
from reports.page_model import build_summary
from reports.records import (
    ERROR,
    EXPECTED_FAIL,
    FAIL,
    PASS,
    UNEXPECTED_PASS,
    UNJUDGED,
    UNSUPPORTED,
    Record,
    RunInfo,
)

CASE = "train/f32/B1.T8.S8.N2.K2.H16.V16/causal/normal/s{}"
PLANNED = {(CASE.format(number), "forward") for number in range(40)}
INFO = RunInfo(command="run", level="quick", environment={"jax": "0.10.2"}, tolerances=[])


def make_record(number: int = 0, verdict: str = PASS, **changed: Any) -> Record:
    values: dict[str, Any] = {
        "implementation": "kernel",
        "platform": "cpu",
        "case": CASE.format(number),
        "check": "forward",
        "observable": "out",
        "verdict": verdict,
        "dtype": "f32",
        "ratio": 1.0,
        "limit": 4.0,
        "reproduce": "python -m conformance run --case=x",
    }
    return Record(**values | changed)


def compare_records(old: Sequence[Record], new: Sequence[Record], **options: Any) -> Comparison:
    return changes.compare_runs(old, new, **{"planned": PLANNED} | options)


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (PASS, FAIL, NEW_FAILURE),
        (PASS, ERROR, NEW_FAILURE),
        (PASS, UNEXPECTED_PASS, NEW_FAILURE),
        (EXPECTED_FAIL, FAIL, NEW_FAILURE),
        (UNSUPPORTED, FAIL, NEW_FAILURE),
        (UNJUDGED, ERROR, NEW_FAILURE),
        (PASS, UNSUPPORTED, NEWLY_UNSUPPORTED),
        (PASS, UNJUDGED, NEWLY_UNJUDGED),
        (FAIL, UNJUDGED, NEWLY_UNJUDGED),
        (FAIL, PASS, FIXED),
        (ERROR, PASS, FIXED),
        (EXPECTED_FAIL, PASS, FIXED),
        (FAIL, EXPECTED_FAIL, NEWLY_EXPECTED),
        (UNSUPPORTED, PASS, NEWLY_JUDGED),
        (PASS, PASS, None),
        (FAIL, FAIL, None),
        (FAIL, ERROR, None),
        (UNJUDGED, UNSUPPORTED, None),
        (UNSUPPORTED, UNSUPPORTED, None),
    ],
)
def test_what_becomes_of_a_judgement(before: str, after: str, kind: str | None) -> None:
    found = compare_records([make_record(0, before)], [make_record(0, after)])
    assert [change.kind for change in found.changes] == ([kind] if kind else [])
    assert bool(found.regressions) == (kind in changes.REGRESSIONS)


def test_what_is_there_no_more_is_gone_if_its_case_was_asked() -> None:
    old, new = [make_record(0), make_record(1)], [make_record(0)]
    assert compare_records(old, new).counts == {GONE: 1}
    assert compare_records(old, new, planned=None).counts == {GONE: 1}  # an older file does not state what was planned
    assert compare_records(old, new, planned={(CASE.format(0), "forward")}).counts == {NOT_JUDGED_AGAIN: 1}
    assert compare_records(old, new, planned={(CASE.format(0), "forward"), (CASE.format(1), "poison")}).counts == {
        NOT_JUDGED_AGAIN: 1
    }
    assert compare_records(
        old, [make_record(0), make_record(1, UNSUPPORTED, check="support", observable="case")]
    ).counts == {
        NEWLY_UNSUPPORTED: 2  # the judgement, and the reason that stands in its place
    }
    assert compare_records([make_record(0), make_record(1, UNJUDGED)], new).counts == {}


def test_what_raised_and_has_results_now_is_fixed() -> None:
    raised = [make_record(0, ERROR, observable="all")]
    assert compare_records(raised, [make_record(0), make_record(0, observable="logsumexp")]).counts == {FIXED: 1}
    assert compare_records(raised, [make_record(0), make_record(0, FAIL, observable="logsumexp")]).counts == {
        NEW_FAILURE: 1,
        GONE: 1,
    }
    assert compare_records(raised, [make_record(0, check="primal")]).counts == {GONE: 1}


def test_a_failure_is_new_where_nothing_was_asked_before() -> None:
    assert compare_records([make_record(0)], [make_record(0), make_record(1, FAIL)]).counts == {NEW_FAILURE: 1}
    assert compare_records([make_record(0)], [make_record(0), make_record(1)]).counts == {}


def test_a_kernel_before_and_after_may_have_two_names_and_two_chips_two_platforms() -> None:
    before = [make_record(number, implementation="old.py:attention") for number in range(3)]
    after = [make_record(number, implementation="new.py:attention", platform="tpu") for number in range(3)]
    assert compare_records(before, after).changes == ()
    worse = [*after[:2], msgspec.structs.replace(after[2], verdict=FAIL)]
    assert compare_records(before, worse).counts == {NEW_FAILURE: 1}


def test_ratios_that_move_are_shown_and_no_regression() -> None:
    old = [make_record(number) for number in range(40)]
    assert not compare_records(old, old).single_shifts
    slightly = [msgspec.structs.replace(one, ratio=1.0 + 0.01 * (place % 7)) for place, one in enumerate(old)]
    assert not compare_records(old, slightly).single_shifts
    assert not compare_records(old, slightly).common_shifts
    all_of_them = [msgspec.structs.replace(one, ratio=1.5) for one in old]
    found = compare_records(old, all_of_them)
    assert [round(moved.factor, 3) for moved in found.common_shifts] == [1.5]
    assert not found.single_shifts
    one_alone = [msgspec.structs.replace(old[0], ratio=3.9), *old[1:]]
    assert not compare_records(old, one_alone).common_shifts
    far = [msgspec.structs.replace(old[0], ratio=1.0 / 5), *old[1:]]
    assert [moved.example for moved in compare_records(old, far).single_shifts] == [CASE.format(0)]
    small = (
        [msgspec.structs.replace(one, ratio=1e-3) for one in old],
        [msgspec.structs.replace(one, ratio=0.1) for one in old],
    )
    assert not compare_records(*small).single_shifts  # far below the limit, before and after
    assert not found.regressions


def test_every_text_says_it() -> None:
    old = [make_record(number) for number in range(40)]
    hostile = "<script>alert(1)</script>"
    new = [make_record(0, FAIL, reason=hostile), *(msgspec.structs.replace(one, ratio=3.0) for one in old[1:])]
    found = compare_records(old, new)
    console = Console(file=io.StringIO(), width=100, color_system=None)
    changes_page.print_comparison(found, console)
    assert isinstance(console.file, io.StringIO)
    page = changes_page.render_changes_page(found, (old, INFO), (new, INFO))
    for text in (page, changes_page.format_changes_markdown(found), console.file.getvalue()):
        assert "Regression: 1 new failure, 1 moved" in text
        assert CASE.format(0) in text.replace("\\", "")
        assert "python -m conformance run --case=x" in text
    assert hostile not in page
    assert page == changes_page.render_changes_page(found, (old, INFO), (new, INFO))


def test_the_page_has_one_section_for_each_cause() -> None:
    names = [(check, observable) for check in ("forward", "gradients") for observable in ("out", "dq")]
    old = [make_record(number, check=check, observable=result) for number in range(3) for check, result in names]
    new = [msgspec.structs.replace(one, verdict=FAIL, ratio=9.0) for one in old]
    findings = build_summary(new, INFO).findings
    found = dataclasses.replace(compare_records(old, new), new_findings=findings)
    page = changes_page.render_changes_page(found, (old, INFO), (new, INFO))
    assert page.count('<section class="group') == len(findings)
    assert len(findings) < len(names)
    for one in findings:
        assert one.title in page
        assert one.finding.smallest.case in page


def test_nothing_changed_reads_so() -> None:
    found = compare_records([make_record()], [make_record()])
    assert changes.format_changes_headline(found) == "No regression: nothing changed; 1 judgements compared."
    assert "Nothing: every judgement" in changes_page.render_changes_page(
        found, ([make_record()], INFO), ([make_record()], INFO)
    )
