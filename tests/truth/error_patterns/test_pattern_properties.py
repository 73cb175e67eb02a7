"""Properties of descriptions: random errors get none, and the description of a planted error is true."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.optional_operands import bias_operand
from conformance.truth.error_patterns.failure import build_failure
from conformance.truth.error_patterns.locations import find_location
from conformance.truth.error_patterns.map_drawing import draw_error_map
from conformance.truth.error_patterns.pattern import find_pattern
from conformance.truth.rounding_bounds import Bounded
from tests.truth.error_patterns.planted_errors import (
    BF16,
    CAUSAL,
    FULL,
    LENGTHS,
    LIMIT,
    SQUARE,
    WINDOW,
    failure,
    noise,
    seen,
    truth,
)

SETTINGS = settings(derandomize=True, deadline=None, max_examples=60)
CASES_OF_F32 = st.sampled_from([CAUSAL, FULL, LENGTHS, WINDOW, SQUARE])
CASES = CASES_OF_F32 | st.just(BF16)
OBSERVABLES = st.sampled_from(["out", "dq", "dk", "dv", "logsumexp", "max_logits"])
# Not so near to 1, or to -1, that nothing is wrong or it has another name.
FACTORS = st.floats(0.05, 0.9) | st.floats(1.1, 40)
SEEDS = st.integers(0, 2**32 - 1)


@SETTINGS
@given(CASES, OBSERVABLES, SEEDS, st.floats(-3, 0), st.floats(0.5, 6), st.sampled_from([0.0, 1.0, 3.0]))
def test_of_errors_at_random_nothing_is_said(
    case: str, observable: str, seed: int, share: float, size: float, tail: float
) -> None:
    """Whatever their size in units of the bound, how many they are, and how much they differ from each other."""
    bounded = truth(case)[1][observable]
    rng = np.random.default_rng(seed)
    errors = rng.standard_normal(bounded.value.shape) * np.exp(tail * rng.standard_normal(bounded.value.shape))
    errors *= 10**size * bounded.bound * (rng.random(bounded.value.shape) < 10**share)

    def plant(x: np.ndarray, _: object) -> np.ndarray:
        return np.where(np.isfinite(x), x + np.nan_to_num(errors), x)

    words = seen(case, observable, plant).words
    assert words == "" or words.startswith(("scattered like rounding", "only one "))


@SETTINGS
@given(CASES, st.sampled_from(["out", "dq", "dk", "dv"]), SEEDS, st.floats(-2, 0.5), st.floats(0, 2))
def test_of_errors_under_loose_bounds_no_form_is_said(
    case: str, observable: str, seed: int, looseness: float, size: float
) -> None:
    """Bounds nearly as large as the values, as of huge logits: half a value and its double are then near each other."""
    problem, core = truth(case)
    value = core[observable].value
    loose = Bounded(value, np.abs(value).mean() * 10**looseness * np.ones_like(value))
    errors = np.random.default_rng(seed).standard_normal(value.shape) * 10**size * loose.bound
    found = build_failure(
        observable, value + errors, loose, None, limit=LIMIT, problem=problem, core={observable: loose}
    )
    assert found is not None
    words = find_pattern(found).words
    assert words == "" or words.startswith(("scattered like rounding", "only one "))


@SETTINGS
@given(CASES, st.sampled_from(["out", "dq", "dk", "dv"]), SEEDS, st.floats(0.5, 5))
def test_of_rows_spoilt_at_random_no_place_and_no_form_is_said(
    case: str, observable: str, seed: int, size: float
) -> None:
    bounded = truth(case)[1][observable]
    rng = np.random.default_rng(seed)
    rows = rng.random(bounded.value.shape[:-1]) < 0.2
    errors = rng.standard_normal(bounded.value.shape) * 10**size * bounded.bound * rows[..., None]
    assert seen(case, observable, lambda x, _: x + errors).words == ""


@SETTINGS
@given(CASES_OF_F32, st.sampled_from(["out", "dq", "dk", "dv", "logsumexp"]), FACTORS, st.booleans())
def test_a_factor_is_said_to_be_what_it_is(case: str, observable: str, factor: float, negative: bool) -> None:
    factor = -factor if negative else factor
    words = seen(case, observable, lambda x, _: np.where(np.isfinite(x), x * factor, x)).words
    told = words.partition(" times the right value")[0]
    # Tolerance: four digits are told, which are off by half of the last one at most
    assert float(told) == pytest.approx(factor, rel=5.1e-4, abs=0)


@SETTINGS
@given(CASES, OBSERVABLES, SEEDS)
def test_a_place_holds_all_that_is_wrong_and_little_else(case: str, observable: str, seed: int) -> None:
    """A box of rows or keys, heads and batch rows is spoilt: nothing outside of what is said is wrong."""
    rng = np.random.default_rng(seed)

    def plant(x: np.ndarray, _: object) -> np.ndarray:
        box = tuple(slice(*sorted(rng.integers(0, n + 1, 2))) for n in x.shape)
        x[box] = np.where(np.isfinite(x[box]), x[box] + rng.standard_normal(x[box].shape), x[box])
        return x

    found = failure(case, observable, plant)
    where = find_location(found)
    if where is not None:
        inside = np.broadcast_to(where.elements, found.got.shape) & found.informative
        assert not (found.wrong & ~inside).any()
        units = found.reduce_to_units(found.wrong)
        assert units.sum() >= 0.5 * found.reduce_to_units(inside).sum()


@SETTINGS
@given(st.integers(4, 40), st.integers(1, 3), st.sampled_from([(2, 1), (4, 2), (3, 3)]))
def test_the_words_for_the_last_row_do_not_depend_on_sizes(length: int, batch: int, heads: tuple[int, int]) -> None:
    case = f"train/f32/B{batch}.T{8 * length}.S{8 * length}.N{heads[0]}.K{heads[1]}.H8.V8/causal/normal/s0"

    def plant(x: np.ndarray, _: object) -> np.ndarray:
        x[:, -1] += noise(x[:, -1].shape)
        return x

    if batch * heads[0] > 2:
        assert seen(case, "out", plant).words == "only the last row (rows that see every key)"
    truth.cache_clear()


@SETTINGS
@given(CASES, OBSERVABLES, SEEDS, st.sampled_from([np.nan, np.inf, -np.inf, 1e300, 0.0]))
def test_whatever_came_something_can_be_said_or_nothing(case: str, observable: str, seed: int, value: float) -> None:
    rng = np.random.default_rng(seed)

    def plant(x: np.ndarray, _: object) -> np.ndarray:
        x[rng.random(x.shape) < rng.random()] = value
        return x

    found = failure(case, observable, plant, dtype=np.float64)
    assert find_pattern(found) == find_pattern(found)
    assert draw_error_map(found) == draw_error_map(found)
    assert find_pattern(found).words.isprintable()


@pytest.mark.parametrize(
    "case",
    [
        *(
            f"train/f32/B3.T32.S40.N4.K2.H8.V8/causal_and_lengths-9-0-40/seg/{bias}/normal/s0"
            for bias in bias_operand.BIASES
        ),
        "train/f32/B1.T40.S40.N4.K1.H8.V16/densehead-d40/segpad/sinks/normal/s0",
        "train/f16/B3.T24.S24.N2.K2.H8.V8/densebatch-d40/segwild/softcap30/normal/s0",
        "train/f32/B1.T64.S64.N2.K1.H16.V16/moba-16-2/normal/s0",
        "decode/bf16/B2.T1.S64.N4.K2.H16.V16/own-l31-40-64/kvint8-token/normal/s0",
        "decode/f32/B1.T1.S1.N1.K1.H1.V1/full/normal/s0",
    ],
)
@pytest.mark.parametrize("spoilt", [1.0, 0.4, 0.02])
def test_every_kind_of_case_can_be_looked_at(case: str, spoilt: float) -> None:
    for observable, bounded in truth(case)[1].items():
        for value in (2.0, 0.0, np.nan, 1e-3):

            def plant(x: np.ndarray, _: object, value: float = value) -> np.ndarray:
                return np.where(np.random.default_rng(5).random(x.shape) < spoilt, value, x)

            found = failure(case, observable, plant)
            if found.wrong.any():
                drawn = draw_error_map(found, find_pattern(found).blocks)
                assert (drawn is None) == (bounded.value.ndim == 1)


def test_one_bias_for_all_is_behind_the_mask_where_it_is_so_for_each() -> None:
    case = "train/f32/B3.T32.S40.N4.K2.H8.V8/causal_and_lengths-20-0-30/biaspair/normal/s0"

    def leaks(x: np.ndarray, right: SimpleNamespace) -> np.ndarray:
        return np.where(right.problem.allowed.any(axis=0, keepdims=True), x, 1e-3)

    assert seen(case, "dbias", leaks).words.startswith("only pairs behind the mask")
