"""What differs looks different, and a word such as "conforms" stands for what was asked."""

from __future__ import annotations

import dataclasses
import re

import pytest

from conformance.records import REFUSED, UNSUPPORTED, Worst
from reports import conformity, text_format
from tests.reports.test_reports import make_failure, make_record, make_run_info


@pytest.mark.parametrize(
    ("got", "expected"), [(1.0, 1.0 + 2**-23), (1.0, 1.0 + 1e-12), (3e38, 3.0000001e38), (0.1990891, -0.28237)]
)
def test_the_difference_can_be_read_off_what_is_shown(got: float, expected: float) -> None:
    text = text_format.worst_text(make_failure(worst=Worst(index=(0,), got=got, expected=expected, bound=1e-8)))
    found = re.search(r"got (\S+), expected (\S+),", text)
    assert found is not None
    shown, true = float(found[1]) - float(found[2]), got - expected
    assert abs(shown - true) <= 0.1 * abs(true)  # Tolerance: to a tenth, as the wording promises


def test_limits_that_differ_are_shown_apart() -> None:
    assert text_format.figures([0.9, 0.90001]) == "0.9, 0.90001"
    assert text_format.figures([4.0, 5.0]) == "4, 5"


def test_one_check_alone_is_no_conformity() -> None:
    unsupported = [make_record(case=f"case/{i}", verdict=UNSUPPORTED, reason="no causal mask") for i in range(9)]
    alone = text_format.format_headline(conformity.build_standings([make_record(), *unsupported]), make_run_info())
    assert alone == "block_flash (cpu) passes in what forward alone judged (1 record)."
    assert "conforms" in text_format.format_headline(
        conformity.build_standings([make_record(), make_record(check="gradients")]), make_run_info()
    )


def test_what_is_refused_without_a_declaration_is_in_the_verdict() -> None:
    def said(check: str, refused: int, judged: int = 2) -> str:
        what = {"check": check, "verdict": UNSUPPORTED, "observable": "all", "figures": {REFUSED: 1.0}}
        found = [make_record(case=f"case/{n}", **what) for n in range(refused)]
        right = [make_record(case=f"case/{9 - n}", check=each) for n in range(judged) for each in ("forward", check)]
        return text_format.format_headline(conformity.build_standings([*found, *right]), make_run_info())

    some = said("gradients", refused=2)
    assert some == "block_flash (cpu) conforms, refusing 2 of 6 questions undeclared."
    most = said("gradients", refused=3)
    assert most.endswith("conforms, refusing 3 of 7 questions undeclared, most of what gradients asks.")
    unoffered = make_record(check="gradients_lse", verdict=UNSUPPORTED, observable="all", reason="not offered")
    standings = conformity.build_standings([make_record(), make_record(check="gradients"), unoffered])
    assert text_format.format_headline(standings, make_run_info()) == "block_flash (cpu) conforms."


def test_operands_that_are_declined_together_are_in_the_verdict() -> None:
    standings = conformity.build_standings([make_record(), make_record(check="gradients")])
    rows = [{"implementation": "block_flash (cpu)", "pairs declined": 148, "pairs": 150}]
    said = text_format.format_headline(standings, dataclasses.replace(make_run_info(), coverage=rows))
    assert said == "block_flash (cpu) conforms, declining 148 of 150 pairs of operands and masks."
