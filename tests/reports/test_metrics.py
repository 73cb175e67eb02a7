"""Every record is counted once, and the worst figure is never hidden."""

from __future__ import annotations

import math

import pytest

from reports import text_format
from reports.metrics import Metric, count_verdicts, find_decisive_metric, find_worst_metric
from reports.page_model import build_summary
from reports.records import (
    EXPECTED_FAIL,
)
from tests.reports.report_samples import (
    make_failure,
    make_many,
    make_one_of_each,
    make_record,
    make_run_info,
)


def test_every_record_is_counted_once() -> None:
    records = [*make_one_of_each(), *make_many(500)]
    standings = build_summary(records, make_run_info()).implementations
    assert sum(s.counts.total for s in standings) == count_verdicts(records).total == len(records)
    assert all(sum(n for _, n in s.counts.parts) == s.counts.total for s in standings)


def test_what_is_displayed_is_what_was_judged() -> None:
    by_rms = make_failure(ratio=3.0, limit=4.0, rms=2.0, rms_limit=0.5)
    metric = find_decisive_metric(by_rms)
    assert metric is not None
    assert (metric.name, metric.share) == ("rms", 4.0)
    assert text_format.format_judged(by_rms) == "max ratio 3, limit 4; rms ratio 2, limit 0.5"
    assert find_decisive_metric(make_failure(ratio=1.0, rms=9.0, ratio_flash=99.0)) == Metric("max", 1.0, 4.0)


def test_close_calls_do_not_look_equal() -> None:
    close = Metric("max", 4.0001, 4.0)
    assert text_format.format_metric(close) == "max ratio 4.0001, limit 4"
    assert text_format.format_share(close.share) != text_format.format_share(1.0)


@pytest.mark.parametrize(("value", "share"), [(0.0, 0.0), (1e-30, math.inf), (math.inf, math.inf)])
def test_a_limit_of_zero_admits_only_zero(value: float, share: float) -> None:
    assert Metric("max", value, 0.0).share == share


def test_nan_is_worse_than_anything() -> None:
    records = [make_failure(ratio=1e30), make_failure(ratio=math.nan), make_record()]
    worst = find_worst_metric(records)
    assert worst is not None
    assert math.isnan(worst.value)


def test_expected_failures_do_not_hide_the_worst_of_the_rest() -> None:
    expected = make_record(verdict=EXPECTED_FAIL, ratio=400.0)
    assert find_worst_metric([expected, make_record(ratio=3.0)]) == Metric("max", 3.0, 4.0)
    assert find_worst_metric([expected]) == Metric("max", 400.0, 4.0)
