"""Comparison with the oracle: what passes, what never passes, and which element is reported as the worst."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from conformance.truth.comparison import compare
from conformance.truth.rounding_bounds import Bounded

SETTINGS = settings(derandomize=True, deadline=None, max_examples=80)
SHAPE = (3, 4, 5)


def bounded(value: float = 1.0, bound: float = 0.5, shape: tuple[int, ...] = SHAPE) -> Bounded:
    return Bounded(np.full(shape, value), np.full(shape, bound))


def with_one(value: float, index: tuple[int, ...] = (1, 2, 3), rest: float = 1.0) -> np.ndarray:
    array = np.full(SHAPE, rest)
    array[index] = value
    return array


def test_the_ratio_is_the_worst_error_over_its_bound_and_the_rms_the_mean_square() -> None:
    found = compare(with_one(3.0), bounded())
    assert found.ratio == 4.0
    assert found.rms == np.sqrt(16 / 60)
    assert found.count == 60
    assert found.problem == ""
    assert found.worst is not None
    assert (found.worst.index, found.worst.got, found.worst.expected, found.worst.bound) == ((1, 2, 3), 3.0, 1.0, 0.5)


@SETTINGS
@given(hnp.arrays(np.float64, (4, 6), elements=st.floats(-10, 10)), st.integers(0, 23))
def test_the_worst_index_is_that_of_the_largest_error_in_units_of_its_own_bound(got: np.ndarray, place: int) -> None:
    bound = np.arange(1.0, 25.0).reshape(4, 6)
    got.flat[place] = 1e6 * bound.flat[place]
    found = compare(got, Bounded(np.zeros((4, 6)), bound))
    assert found.worst is not None
    assert found.worst.index == divmod(place, 6)
    assert found.ratio == 1e6
    assert found.ratio == np.max(np.abs(got) / bound)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_nan_and_infinity_never_pass_for_a_finite_value(bad: float, dtype: type) -> None:
    for bound in (0.0, 0.5, 1e300):
        found = compare(with_one(bad).astype(dtype), bounded(bound=bound))
        assert found.ratio == np.inf
        assert found.rms == np.inf
        assert found.worst is not None
        assert found.worst.index == (1, 2, 3)


@SETTINGS
@given(st.integers(0, 4999), st.sampled_from([np.float64, np.float32, np.float16]))
def test_a_single_nan_is_found_wherever_it_is_among_thousands(place: int, dtype: type) -> None:
    got: np.ndarray = np.ones(5000, dtype)
    got[place] = np.nan
    found = compare(got, bounded(shape=(5000,)))
    assert found.ratio == np.inf
    assert found.worst is not None
    assert found.worst.index == (place,)


@pytest.mark.parametrize("size", [4096, 5000, 100_000])
def test_all_nan_never_passes_at_sizes_where_xlas_max_drops_it(size: int) -> None:
    assert compare(np.full(size, np.nan, np.float32), bounded(shape=(size,))).ratio == np.inf


def test_nan_does_not_pass_for_an_expected_infinity_either() -> None:
    assert compare(with_one(np.nan, rest=-np.inf), bounded(-np.inf, 0.0)).ratio == np.inf


@pytest.mark.parametrize("bound", [0.0, 1.0])
def test_an_expected_infinity_needs_the_same_infinity(bound: float) -> None:
    assert compare(np.full(SHAPE, -np.inf), bounded(-np.inf, bound)).ratio == 0.0
    for wrong in (np.inf, -3e38, 0.0):
        assert compare(with_one(wrong, rest=-np.inf), bounded(-np.inf, bound)).ratio == np.inf


def test_a_zero_bound_needs_equality() -> None:
    assert compare(np.zeros(SHAPE), bounded(0.0, 0.0)).ratio == 0.0
    assert compare(-np.zeros(SHAPE), bounded(0.0, 0.0)).ratio == 0.0
    assert compare(with_one(1e-300, rest=0.0), bounded(0.0, 0.0)).ratio == np.inf


@pytest.mark.parametrize("shape", [(), (60,), (3, 4), (3, 4, 1), (3, 5, 4), (1, 3, 4, 5), (0, 4, 5)])
def test_a_wrong_shape_is_named_and_never_broadcast(shape: tuple[int, ...]) -> None:
    found = compare(np.ones(shape), bounded())
    assert found.ratio == found.rms == np.inf
    assert str(shape) in found.problem
    assert str(SHAPE) in found.problem


def test_elements_that_are_not_judged_are_left_out() -> None:
    got = with_one(np.nan)
    judged = np.ones((3, 4, 1), bool)
    judged[1, 2] = False
    found = compare(got, bounded(), judged)
    assert (found.ratio, found.rms, found.count) == (0.0, 0.0, 55)
    assert compare(got, bounded(), ~judged).ratio == np.inf
    assert compare(got, bounded(), ~judged).count == 5
    got[0, 0, 0] = 2.0
    worst = compare(got, bounded(), judged).worst
    assert worst is not None
    assert worst.index == (0, 0, 0)


def test_nothing_judged_is_counted_as_nothing() -> None:
    found = compare(with_one(np.nan), bounded(), np.zeros(SHAPE, bool))
    assert (found.ratio, found.count, found.worst) == (0.0, 0, None)


def test_a_shape_is_wrong_even_where_nothing_is_judged() -> None:
    assert compare(np.ones(3), bounded(), np.zeros(SHAPE, bool)).ratio == np.inf


def test_an_empty_array_has_nothing_to_judge() -> None:
    assert compare(np.ones((0, 4)), bounded(shape=(0, 4))).count == 0


def test_a_scalar_is_compared_too() -> None:
    found = compare(np.float32(2.0), bounded(shape=()))
    assert found.ratio == 2.0
    assert found.worst is not None
    assert found.worst.index == ()


@pytest.mark.parametrize("dtype", [np.complex64, np.int32, np.bool_, object])
def test_what_is_no_float_is_malformed_not_converted(dtype: type) -> None:
    found = compare(np.ones(SHAPE).astype(dtype), bounded())
    assert found.ratio == np.inf
    assert np.dtype(dtype).name in found.problem
