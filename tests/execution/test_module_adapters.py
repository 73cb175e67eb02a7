"""Helpers for adapters: identity weights and names of axes."""

from __future__ import annotations

import numpy as np
import pytest

import conformance

NAMES = dict(zip("BTSNKHV", ("batch", "query", "key", "heads", "kv_heads", "depth", "v_depth"), strict=True))


def test_identity_weights_leave_features_as_they_are() -> None:
    x = np.random.default_rng(0).normal(size=(2, 5, 3, 4)).astype(np.float32)
    weights = conformance.identity_projection(3, 4)
    projected = np.einsum("btd,dnh->btnh", x.reshape(2, 5, 12), weights)
    np.testing.assert_array_equal(projected, x)
    back = np.einsum("btnh,nhd->btd", projected, weights.reshape(3, 4, 12))
    np.testing.assert_array_equal(back, x.reshape(2, 5, 12))


@pytest.mark.parametrize(
    ("operand", "axes"),
    [
        ("q", ("batch", "query", "heads", "depth")),
        ("v", ("batch", "key", "kv_heads", "v_depth")),
        ("out", ("batch", "query", "heads", "v_depth")),
        ("sinks", ("heads",)),
    ],
)
def test_axes_are_named_in_the_order_of_the_contract(operand: str, axes: tuple[str, ...]) -> None:
    assert conformance.name_axes(operand, NAMES) == axes


def test_what_has_no_name_is_said() -> None:
    with pytest.raises(ValueError, match="axis N of sinks"):
        conformance.name_axes("sinks", {"B": "batch"})
    with pytest.raises(ValueError, match="segment_ids"):
        conformance.name_axes("segment_ids", NAMES)
