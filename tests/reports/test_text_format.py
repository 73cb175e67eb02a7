"""Figures that differ look different."""

from __future__ import annotations

import re

import pytest

from reports import text_format
from reports.records import Worst
from tests.reports.report_samples import make_failure


@pytest.mark.parametrize(
    ("got", "expected"), [(1.0, 1.0 + 2**-23), (1.0, 1.0 + 1e-12), (3e38, 3.0000001e38), (0.1990891, -0.28237)]
)
def test_the_difference_can_be_read_off_what_is_shown(got: float, expected: float) -> None:
    text = text_format.format_worst(make_failure(worst=Worst(index=(0,), got=got, expected=expected, bound=1e-8)))
    found = re.search(r"got (\S+), expected (\S+),", text)
    assert found is not None
    shown, true = float(found[1]) - float(found[2]), got - expected
    assert abs(shown - true) <= 0.1 * abs(true)  # Tolerance: to a tenth, as `_format_distinct` promises


def test_limits_that_differ_are_shown_apart() -> None:
    assert text_format.format_figures([0.9, 0.90001]) == "0.9, 0.90001"
    assert text_format.format_figures([4.0, 5.0]) == "4, 5"
