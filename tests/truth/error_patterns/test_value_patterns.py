"""Every kind of wrong value is described if it is planted in right results, and none otherwise."""

from __future__ import annotations

import math
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from conformance.truth.error_patterns.failure import build_failure
from conformance.truth.error_patterns.pattern import find_pattern
from conformance.truth.rounding_bounds import Bounded
from tests.truth.error_patterns.planted_errors import (
    BF16,
    CAUSAL,
    FULL,
    LENGTHS,
    ONE_HEAD,
    SQUARE,
    WINDOW,
    Plant,
    noise,
    seen,
    truth,
)

MANY = ("out", "dq", "dk", "dv")


def times(factor: float) -> Plant:
    return lambda x, _: x * factor


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (math.log2(math.e), "1.443 times the right value (log2(e))"),
        (math.log(2), "0.6931 times the right value (ln(2))"),
        (2.0, "2 times the right value (the group's size)"),
        (0.5, "0.5 times the right value (1/the group's size)"),
        (8.0, "8 times the right value (sqrt(H))"),
        (1 / 8, "0.125 times the right value (1/sqrt(H))"),
        (64.0, "64 times the right value (H)"),
        (1.37, "1.37 times the right value"),
        (1.001, "1.001 times the right value"),
        (-1.0, "minus the right value: the sign is wrong"),
        (-2.0, "-2 times the right value"),
    ],
)
@pytest.mark.parametrize("observable", MANY)
def test_a_factor_is_named(observable: str, factor: float, words: str) -> None:
    assert seen(CAUSAL, observable, times(factor)).words == words


def test_a_factor_is_told_from_its_neighbours_in_bf16_too() -> None:
    assert seen(BF16, "out", times(math.log2(math.e)), dtype=ml_dtypes.bfloat16).words.startswith("1.44")
    assert "log2" not in seen(BF16, "out", times(1.40), dtype=ml_dtypes.bfloat16).words


def test_the_soft_cap_is_among_the_factors() -> None:
    assert seen(FULL, "dq", times(30.0)).words == "30 times the right value (the soft cap)"


def test_logsumexp_in_base_two_is_a_factor_and_a_lost_maximum_is_named() -> None:
    assert seen(CAUSAL, "logsumexp", times(math.log2(math.e))).words == "1.443 times the right value (log2(e))"
    without = seen(CAUSAL, "logsumexp", lambda x, right: x - right.max_logits)
    assert without.words == "the logarithm of the sum, without the maximum"
    total = seen(CAUSAL, "logsumexp", lambda x, right: np.exp(x - right.max_logits))
    assert total.words == "the sum itself, not its logarithm"
    assert seen(CAUSAL, "logsumexp", lambda x, right: right.max_logits).words == "what `max_logits` must be"


@pytest.mark.parametrize(
    ("number", "words"),
    [(math.log(2), "0.6931 too large (ln(2))"), (-0.25, "0.25 too small"), (3e-4, "0.0003 too large")],
)
def test_a_number_that_is_added_is_named(number: float, words: str) -> None:
    assert seen(CAUSAL, "logsumexp", lambda x, _: x + number).words == words


def test_rows_and_heads_with_factors_of_their_own_are_named() -> None:
    def rows(x: np.ndarray, _: object) -> np.ndarray:
        return x * (1.5 + 0.3 * np.tanh(noise(x.shape[:-1])))[..., None]

    def heads(x: np.ndarray, _: object) -> np.ndarray:
        return x * np.array([1.5, 1.25, 2.0, 0.5])[:, None]

    assert seen(CAUSAL, "out", rows).words.startswith("each row the right one times a factor of its own, 1.2")
    assert seen(CAUSAL, "dq", heads).words == "each head the right one times a factor of its own, 1.5, 1.25, 2, 0.5"
    assert seen(CAUSAL, "dv", rows).words.startswith("each key the right one times a factor of its own")


@pytest.mark.parametrize("observable", MANY)
def test_zeros_constants_and_lost_numbers_are_named(observable: str) -> None:
    assert seen(CAUSAL, observable, times(0.0)).words == "zero"
    assert seen(CAUSAL, observable, lambda x, _: np.ones_like(x)).words == "one value everywhere, 1"
    assert seen(CAUSAL, observable, lambda x, _: np.full_like(x, np.nan)).words == "NaN everywhere"
    assert seen(CAUSAL, observable, lambda x, _: np.full_like(x, np.inf)).words == "infinity everywhere"


def nan_where(rows: str) -> Plant:
    def plant(x: np.ndarray, right: SimpleNamespace) -> np.ndarray:
        x[getattr(right.problem, rows).transpose(0, 2, 1)] = np.nan
        return x

    return plant


def test_nan_in_rows_without_keys_is_named() -> None:
    found = seen(LENGTHS, "out", nan_where("empty_rows")).words
    assert found.startswith("NaN, only ")
    assert "rows that may attend to nothing" in found


def test_nan_in_rows_without_keys_is_named_however_few_they_are() -> None:
    few = "train/f32/B3.T1.S72.N2.K1.H16.V16/lengths-40-0-1/normal/s0"
    assert seen(few, "out", nan_where("empty_rows")).words.startswith("NaN, only rows that may attend to nothing")


def test_nan_beside_other_errors_says_so() -> None:
    def plant(x: np.ndarray, _: object) -> np.ndarray:
        x[:, 96:] = np.nan
        return 2 * x

    assert seen(CAUSAL, "out", plant).words == "NaN, only rows from 96 on, a multiple of 32; other values are wrong too"


def test_nan_here_and_there_is_counted() -> None:
    def plant(x: np.ndarray, _: object) -> np.ndarray:
        return np.where(np.random.default_rng(3).random(x.shape) < 0.2, np.nan, x)

    assert seen(CAUSAL, "out", plant).words == "NaN in 20% of the values"


def test_numbers_where_there_is_no_key_are_named() -> None:
    found = seen(LENGTHS, "logsumexp", lambda x, _: np.maximum(x, -1e30)).words
    assert "rows that may attend to nothing" in found
    assert found.endswith("; there one value everywhere, -1e+30") or found.endswith("there finite where -inf is right")


def test_keys_that_were_never_written_are_named_beside_other_errors() -> None:
    def plant(x: np.ndarray, _: object) -> np.ndarray:
        x += 0.1 * noise(x.shape)
        x[:, 128:] = 0
        return x

    expected = "zero, only keys from 128 on, a multiple of 128; other values are wrong too"
    assert seen(CAUSAL, "dv", plant).words == expected


def test_a_place_and_a_form_are_said_together() -> None:
    def plant(x: np.ndarray, _: object) -> np.ndarray:
        x[:, 128:] *= 2
        return x

    words = seen(CAUSAL, "dq", plant).words
    assert words.startswith("only rows from 128 on, a multiple of 128")
    assert words.endswith("; there 2 times the right value (the group's size)")


def test_rows_that_are_right_as_any_multiple_of_zero_make_no_place() -> None:
    def zeros_first(x: np.ndarray, _: object) -> np.ndarray:
        x[:, :, :2] = 0
        return x

    problem, core = truth(CAUSAL)
    zero = Bounded(zeros_first(core["logsumexp"].value.copy(), None), core["logsumexp"].bound)
    doubled = zero.value * 2
    found = build_failure("logsumexp", doubled, zero, None, limit=4.0, problem=problem, core={"logsumexp": zero})
    assert found is not None
    assert find_pattern(found).words == "2 times the right value (the group's size)"


def test_a_place_stays_where_the_form_stops() -> None:
    def plant(x: np.ndarray, _: object) -> np.ndarray:
        x[:, 1:] *= 2
        return x

    assert seen(CAUSAL, "dv", plant).words == "all keys but the first; there 2 times the right value (the group's size)"


@pytest.mark.parametrize(
    ("case", "observable", "plant", "words"),
    [
        (CAUSAL, "out", lambda x, _: np.roll(x, 1, axis=1), "each row what the row before must be"),
        (CAUSAL, "dq", lambda x, _: np.roll(x, -1, axis=1), "each row what the row after must be"),
        (CAUSAL, "dk", lambda x, _: np.roll(x, 1, axis=1), "each key what the key before must be"),
        (CAUSAL, "dv", lambda x, _: x[:, ::-1], "keys in reverse"),
        (CAUSAL, "out", lambda x, _: x[:, :, [0, 2, 1, 3]], "heads interleaved, not grouped"),
        (FULL, "out", lambda x, _: x[:, :, [1, 0, 2, 3, 4, 5, 7, 6]], "heads in another order: 0 is 1, 1 is 0, 6 is 7"),
        (CAUSAL, "out", lambda x, _: x[:, :, [0, 0, 0, 0]], "each head what head 0 must be"),
        (CAUSAL, "dk", lambda x, _: x[:, :, ::-1], "key/value heads in reverse"),
        (CAUSAL, "out", lambda x, _: x[[0, 0]], "each batch row what batch row 0 must be"),
        (
            CAUSAL,
            "out",
            lambda x, _: x.swapaxes(1, 2).reshape(x.shape),
            "laid out as [B, N, T, V] and read as [B, T, N, V]",
        ),
        (
            CAUSAL,
            "dq",
            lambda x, _: x.swapaxes(2, 3).reshape(x.shape),
            "laid out as [B, T, H, N] and read as [B, T, N, H]",
        ),
        (ONE_HEAD, "dq", lambda x, _: x.swapaxes(1, 3), "T and H exchanged: transposed"),
        (SQUARE, "out", lambda x, _: x.swapaxes(0, 2), "B and N exchanged: transposed"),
        (CAUSAL, "dk", lambda x, right: right.dv, "what `dv` must be"),
    ],
)
def test_right_values_elsewhere_are_named(case: str, observable: str, plant: Plant, words: str) -> None:
    found = seen(case, observable, plant).words
    assert found.startswith(words) or found.partition("; there ")[2].startswith(words)


def test_rows_that_do_not_differ_are_named() -> None:
    def plant(x: np.ndarray, _: object) -> np.ndarray:
        return np.broadcast_to(x.mean(axis=1, keepdims=True), x.shape)

    assert seen(CAUSAL, "out", plant).words == "every row the same"


def test_values_of_fewer_bits_are_named() -> None:
    def plant(x: np.ndarray, _: object) -> np.ndarray:
        return x.astype(ml_dtypes.bfloat16).astype(np.float64)

    assert seen(CAUSAL, "out", plant).words == "rounded to bf16"
    assert seen(CAUSAL, "dv", lambda x, _: x.astype(np.float16)).words == "rounded to f16"


@pytest.mark.parametrize("bits", [8, 11])
def test_errors_like_those_of_rounding_are_named_with_their_size(bits: int) -> None:
    def plant(x: np.ndarray, _: object) -> np.ndarray:
        rms = np.sqrt(np.mean(x**2, axis=-1, keepdims=True))
        return x + 2.0**-bits * rms * noise(x.shape)

    assert seen(WINDOW, "out", plant).words == f"scattered like rounding, about 2^-{bits} of the values"


def test_larger_errors_are_no_rounding() -> None:
    assert seen(FULL, "out", lambda x, _: x + 0.1 * noise(x.shape)).words == ""
