"""What differs looks different, and a word such as "conforms" stands for what was asked."""

from __future__ import annotations

import re

import pytest

from conformance.records import UNSUPPORTED, Worst
from reports import summary, wording
from tests.reports.test_reports import failure, record, run_info


@pytest.mark.parametrize(
    ("got", "expected"), [(1.0, 1.0 + 2**-23), (1.0, 1.0 + 1e-12), (3e38, 3.0000001e38), (0.1990891, -0.28237)]
)
def test_the_difference_can_be_read_off_what_is_shown(got: float, expected: float) -> None:
    text = wording.worst_text(failure(worst=Worst(index=(0,), got=got, expected=expected, bound=1e-8)))
    found = re.search(r"got (\S+), expected (\S+),", text)
    assert found is not None
    shown, true = float(found[1]) - float(found[2]), got - expected
    assert abs(shown - true) <= 0.1 * abs(true)  # Tolerance: to a tenth, as the wording promises


def test_limits_that_differ_are_shown_apart() -> None:
    assert wording.figures([0.9, 0.90001]) == "0.9, 0.90001"
    assert wording.figures([4.0, 5.0]) == "4, 5"


def test_one_check_alone_is_no_conformity() -> None:
    unsupported = [record(case=f"case/{i}", verdict=UNSUPPORTED, reason="no causal mask") for i in range(9)]
    alone = wording.headline(summary.standings([record(), *unsupported]), run_info())
    assert alone == "block_flash (cpu) passes in what forward alone judged (1 record)."
    assert "conforms" in wording.headline(summary.standings([record(), record(check="gradients")]), run_info())
