"""Matrices have a fixed order of rows and lose no record."""

from __future__ import annotations

from reports.matrices import build_matrices
from reports.record_groups import NO_FEATURE, group_records
from reports.records import (
    UNJUDGED,
    UNSUPPORTED,
)
from tests.reports.report_samples import (
    make_record,
    make_run_info,
    render_html,
)


def test_features_have_a_fixed_order_by_kind_and_lose_no_record() -> None:
    records = [
        make_record(features=("sinks", "causal")),
        make_record(features=()),
        make_record(features=("bias", "sinks")),
    ]
    matrix = build_matrices(group_records(records))[0]
    assert matrix.groups == (
        ("mask", ("causal",)),
        ("operands", ("sinks", "bias")),
        ("others", (NO_FEATURE,)),
    )
    assert matrix.cells[matrix.implementations[0], "sinks"].counts.total == 2


def test_the_matrix_tells_unsupported_from_unjudged() -> None:
    records = [
        make_record(features=("bias",), verdict=UNSUPPORTED, reason="no bias operand"),
        make_record(features=("sinks",), verdict=UNJUDGED, reason="no GPU"),
        make_record(features=("causal",)),
        make_record(features=("causal",), verdict=UNSUPPORTED),
    ]
    matrix = build_matrices(group_records(records))[0]
    states = {feature: matrix.cells[matrix.implementations[0], feature].state for feature in matrix.rows}
    assert states == {"bias": "unsupported", "sinks": "unjudged", "causal": "pass"}
    assert 'title="no bias operand"' in render_html(records, make_run_info())
