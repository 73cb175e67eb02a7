"""Gradients, margins, quantiles and cost are computed from the figures of records."""

from __future__ import annotations

import math

import pytest

from reports.measures import build_measures, compute_spread
from reports.record_groups import group_records
from tests.reports.report_samples import (
    make_many,
    make_record,
)


def test_gradients_show_both_backwards() -> None:
    records = [
        make_record(observable="dq", ratio=2.0, ratio_flash=1.5),
        make_record(observable="dq", ratio=1.0, ratio_flash=3.0),
    ]
    table = build_measures(group_records([*records, make_record()])).gradients
    (cell,) = table.cells.values()
    assert (cell.count, cell.ratio, cell.ratio_flash) == (2, 2.0, 3.0)


def test_a_margin_counts_each_case_once_by_its_weakest() -> None:
    records = [
        make_record(case="a", margin=50.0),
        make_record(case="a", margin=0.5),
        make_record(case="b", margin=math.inf),
    ]
    (row,) = build_measures(group_records(records)).margins
    assert (row.cases, row.least, row.weakest_case, row.buckets) == (2, 0.5, "a", (1, 0, 0, 0, 1))


def test_quantiles_are_values_that_occurred() -> None:
    spread = compute_spread([3.0, math.nan, 1.0, 2.0])
    assert (spread.least, spread.median) == (1.0, 2.0)
    assert math.isnan(spread.most)


def test_cost_adds_up() -> None:
    records = make_many(100)
    table = build_measures(group_records(records)).cost
    # Tolerance: sums of as many positive numbers as there are records, each with as many roundings at most.
    rounding = 2 * len(records) * 2.0**-53
    # Tolerance: as above.
    assert table.total == pytest.approx(sum(r.seconds for r in records), rel=rounding, abs=0)
    # Tolerance: as above.
    assert sum(table.sum_check(check) for check in table.checks) == pytest.approx(table.total, rel=rounding, abs=0)
