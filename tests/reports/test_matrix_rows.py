"""Every feature and every check has its place among the rows of the matrices."""

from __future__ import annotations

from cases.case import FEATURES
from conformance.checks import CHECKS
from reports.matrix_rows import CHECK_KINDS, FEATURE_KINDS, group_rows


def test_every_feature_has_a_kind_and_every_kind_its_features() -> None:
    assert [name for names in FEATURE_KINDS.values() for name in names] == list(FEATURES)


def test_every_check_has_a_kind() -> None:
    placed = [name for names in CHECK_KINDS.values() for name in names]
    assert len(placed) == len(set(placed))
    assert {check.name for check in CHECKS} <= set(placed)


def test_rows_do_not_depend_on_what_came_first() -> None:
    one, other = (group_rows(found, FEATURE_KINDS) for found in (["bias", "f32", "new"], ["f32", "new", "bias"]))
    assert one == other == [("dtype", ("f32",)), ("operands", ("bias",)), ("others", ("new",))]
