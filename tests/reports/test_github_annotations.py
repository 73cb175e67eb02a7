"""Each finding is one annotation of GitHub Actions, in a syntax that no text of a record breaks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from reports import changes, github_annotations
from reports.causes.finding_text import describe_finding
from reports.causes.root_causes import find_root_causes
from reports.github_annotations import MAX_ANNOTATIONS, Annotation, annotate_changes, annotate_records, format_commands
from reports.records import (
    ERROR,
    EXPECTED_FAIL,
    FAIL,
    PASS,
    UNEXPECTED_PASS,
    UNJUDGED,
    UNSUPPORTED,
    Diagnosis,
    Record,
    SimilarBug,
)

CASE = "train/f32/B1.T{0}.S{0}.N2.K2.H16.V16/causal/normal/s0"
COMMAND = re.compile(r"::(error|warning) ((?:\w+=[^:,\n]*)(?:,\w+=[^:,\n]*)*)::([^\n\r]*)")


def make_record(verdict: str, number: int = 8, **changed: Any) -> Record:
    values: dict[str, Any] = {"implementation": "kernel", "platform": "cpu", "check": "forward", "observable": "out"}
    return Record(case=CASE.format(number), verdict=verdict, reproduce="python -m conformance run", **values | changed)


def find_no_place(record: Record) -> None:
    return None


def list_titles(records: Sequence[Record]) -> list[str]:
    return [one.title.removeprefix("kernel (cpu): ") for one in annotate_records(records, find_no_place)]


def parse_command(line: str) -> tuple[str, dict[str, str], str]:
    """Parse a workflow command as GitHub does."""
    match = COMMAND.fullmatch(line)
    assert match is not None, line
    properties = dict(each.split("=", 1) for each in match[2].split(","))
    for escaped, character in (("%3A", ":"), ("%2C", ",")):
        properties = {name: value.replace(escaped, character) for name, value in properties.items()}
    return match[1], {name: unescape(value) for name, value in properties.items()}, unescape(match[3])


def unescape(text: str) -> str:
    return text.replace("%0D", "\r").replace("%0A", "\n").replace("%25", "%")


def test_there_is_one_annotation_for_each_finding_and_not_for_each_record() -> None:
    failing = [
        make_record(FAIL, n, check=check, observable=o) for n in (9, 8, 7) for check in "ab" for o in ("out", "dq")
    ]
    (one, two) = annotate_records(failing, find_no_place)
    assert [one.title, two.title] == ["kernel (cpu): a fails", "kernel (cpu): b fails"]
    assert one.count == 6
    expected = ("fails in 3 of 3 cases", "explains 6 failures in 3 cases: dq, out", f"smallest: {CASE.format(7)}")
    assert one.lines[:3] == expected
    assert one.lines[-1] == "python -m conformance run"


def test_an_annotation_names_the_planted_bug_that_its_finding_resembles() -> None:
    failing = [make_record(FAIL, number) for number in (9, 8)]
    (finding,) = find_root_causes(failing)
    diagnosis = Diagnosis(bugs=(SimilarBug("mask-forgotten", "masks", "PR 1", 0.99),), cases=2, known=9)
    (one,) = annotate_records(failing, find_no_place, (), {finding.key: diagnosis})
    assert any("mask-forgotten" in line for line in one.lines)
    text = describe_finding(1, finding, diagnosis)
    passing = [make_record(PASS, number) for number in (9, 8)]
    compared = dataclasses.replace(changes.compare_runs(passing, failing, planned=None), new_findings=(text,))
    (new,) = annotate_changes(compared, find_no_place)
    assert new.count == 2
    assert any("mask-forgotten" in line for line in new.lines)


def test_one_cause_in_many_checks_is_one_finding() -> None:
    poisoned = [make_record(FAIL, check="poison", observable=f"{name}.nan") for name in ("out", "dq", "dk")]
    explained = [make_record(FAIL, check=check, remedy='products="tf32"') for check in ("forward", "gradients")]
    assert list_titles(poisoned) == ["NaN or infinity behind the mask reaches the results"]
    (one,) = annotate_records(explained, find_no_place)
    assert one.title == "kernel (cpu): out is wrong"
    assert '2 failures in forward, gradients would pass with the declaration products="tf32"' in one.lines
    raised = [
        make_record(ERROR, n, check=c, reason=f"ValueError: {n} heads") for n in (3, 4) for c in ("forward", "primal")
    ]
    other = make_record(ERROR, reason="TypeError: none")
    assert list_titles(raised) == ["raises ValueError: 3 heads"]
    assert [title.partition(",")[0] for title in list_titles([*raised, other])] == [
        "raises ValueError: 3 heads",
        "raises TypeError: none",
    ]
    assert len(list_titles([*raised, *poisoned, make_record(FAIL, 9)])) == 3


def test_what_raised_at_one_line_is_one_finding_with_its_place() -> None:
    reason = "ValueError: {0} (src/kernel, a.py:12: raise ValueError({0}))"
    raised = [make_record(ERROR, n, check=c, reason=reason.format(c)) for n in (3, 4) for c in ("forward", "primal")]
    (one,) = annotate_records(raised, lambda record: ("src/kernel, a.py", 12))
    (line,) = format_commands([one])
    kind, properties, text = parse_command(line)
    assert kind == "error"
    assert (properties["file"], properties["line"]) == ("src/kernel, a.py", "12")
    assert properties["title"].startswith("kernel (cpu): raises ValueError: ")
    assert "explains 4 failures in 2 cases, of forward, primal" in text
    assert "file=" not in format_commands(annotate_records(raised, find_no_place))[0]


def test_expected_failures_and_passes_are_none_and_unexpected_passes_are_warnings() -> None:
    quiet = [make_record(verdict) for verdict in (PASS, EXPECTED_FAIL, UNSUPPORTED, UNJUDGED)]
    assert annotate_records(quiet, find_no_place) == []
    listed = [make_record(UNEXPECTED_PASS, n, check="poison", observable="out.nan", reason="known") for n in (3, 4)]
    (line,) = format_commands(annotate_records(listed, find_no_place))
    kind, properties, text = parse_command(line)
    assert (kind, properties["title"]) == ("warning", "kernel (cpu): an expected failure passes")
    assert "explains 2 failures in 2 cases" in text


def test_no_more_are_written_than_github_shows_and_the_last_says_how_many_there_are() -> None:
    many = [make_record(FAIL, n, check=f"check{c}", implementation=i) for c in range(12) for n in (7, 8) for i in "abc"]
    lines = format_commands(annotate_records([*many, make_record(UNEXPECTED_PASS)], find_no_place))
    found = [parse_command(line) for line in lines]
    assert [kind for kind, _, _ in found] == ["error"] * MAX_ANNOTATIONS + ["warning"]
    assert found[MAX_ANNOTATIONS - 1][2] == "27 more findings (54 records) are in the summary and the report"
    # No implementation pushes another out.
    assert {properties["title"][0] for _, properties, _ in found[: MAX_ANNOTATIONS - 1]} == set("abc")
    ten = format_commands(
        annotate_records([make_record(FAIL, check=f"check{n}") for n in range(MAX_ANNOTATIONS)], find_no_place)
    )
    assert len(ten) == MAX_ANNOTATIONS
    assert "more findings" not in "".join(ten)


def test_no_text_of_a_kernel_breaks_out_of_its_annotation() -> None:
    wild = "100%, a: b\n::error::x\r\n\x1b[31m \u202e \u2028 %0A"
    found = annotate_records(
        [make_record(ERROR, implementation=f"k{wild}", platform=wild, reason=wild, check=wild)], find_no_place
    )
    (line,) = format_commands(found)
    assert line.isprintable()
    _, properties, text = parse_command(line)
    assert set(properties) == {"title"}
    assert "\x1b" not in properties["title"] + text
    assert r"100%, a: b \x3a:error::x" in text
    assert "%0A" in text  # an escaped end of a line in the message
    raw = Annotation("error", "k", "t:a,b%\n", ("one\r\ntwo", "", "three"), 1, ("a:b,c.py", 3))
    assert format_commands([raw]) == ["::error file=a%3Ab%2Cc.py,line=3,title=t%3Aa%2Cb%25%0A::one%0D%0Atwo%0Athree"]


def compare_records(old: Sequence[Record], new: Sequence[Record]) -> changes.Comparison:
    return changes.compare_runs(old, new, planned=None)


def test_a_comparison_is_annotated_with_what_became_worse() -> None:
    old = [make_record(PASS, n, check=c) for n in (8, 9) for c in ("forward", "primal")]
    new = [
        *(make_record(FAIL, n) for n in (8, 9)),
        make_record(UNJUDGED, 8, check="primal", reason="no such device"),
        make_record(PASS, 10),
    ]
    found = annotate_changes(compare_records(old, new), find_no_place)
    assert [one.title for one in found] == [
        "new: kernel (cpu): out is wrong",
        "kernel (cpu): primal newly unjudged",
        "kernel (cpu): primal gone",
    ]
    assert [one.kind for one in found] == [github_annotations.ERROR_LEVEL] * 3
    assert "no such device" in found[1].lines
    assert found[2].lines[0] == f"1 gone: pass → not there, as in {CASE.format(9)}"
    without = annotate_changes(compare_records(old, new), find_no_place, without_failures=True)
    assert [one.title for one in without] == [one.title for one in found[1:]]
    assert annotate_changes(compare_records(new, new), find_no_place) == []
    assert annotate_changes(compare_records([make_record(FAIL)], [make_record(PASS)]), find_no_place) == []
