"""Exact probabilities pass independent masks at the rate, and fail masks at other rates or with structure."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.truth import mask_statistics

SHAPE = (4, 2, 2, 64, 96)
SEEN = np.ones(SHAPE[1:], bool)


def draw(rate: float, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(shape) >= rate


def find_failures(kept: np.ndarray, rate: float, seen: np.ndarray = SEEN) -> set[str]:
    surprises = (
        mask_statistics.judge_rate(kept, seen, rate),
        *mask_statistics.judge_independence(kept, seen, rate),
    )
    return {
        name for name, one in zip(("rate", "masks", "places", "corners"), surprises, strict=True) if not one.is_credible
    }


@given(st.integers(1, 30), st.floats(0.01, 0.99), st.data())
def test_tails_are_those_of_the_binomial_distribution(places: int, p: float, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, places))
    terms = [math.comb(places, k) * p**k * (1 - p) ** (places - k) for k in range(places + 1)]
    expected = min(1.0, 2 * min(sum(terms[: count + 1]), sum(terms[count:])))
    got = mask_statistics.compute_tails(np.array(count), np.array(places), p)
    # Up to 31 terms in float64 on each side.
    assert float(got) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_independent_masks_pass(rate: float, seed: int) -> None:
    seen = np.tril(SEEN, 32)
    assert find_failures(draw(rate, seed=seed), rate) == set()
    assert find_failures(draw(rate, seed=seed), rate, seen) == set()


def test_another_rate_fails() -> None:
    assert "rate" in find_failures(draw(29 / 256), 0.1)
    assert "rate" in find_failures(draw(0.0077), 0.001)


def test_structure_fails() -> None:
    def spread(shape: tuple[int, ...]) -> np.ndarray:
        return np.broadcast_to(draw(0.25, shape), SHAPE)

    assert "masks" in find_failures(spread((1, *SHAPE[1:])), 0.25)
    assert "masks" in find_failures(spread((4, 1, *SHAPE[2:])), 0.25)
    assert "masks" in find_failures(spread((4, 2, 1, *SHAPE[3:])), 0.25)
    assert "places" in find_failures(spread((4, 2, 2, 1, 96)), 0.25)
    assert "places" in find_failures(np.tile(draw(0.25, (4, 2, 2, 32, 96)), (1, 1, 1, 2, 1)), 0.25)
    rows, columns = draw(0.5, (4, 2, 2, 64, 1)), draw(0.5, (4, 2, 2, 1, 96))
    assert find_failures(rows ^ columns, 0.5) >= {"corners"}


def test_a_surprise_says_where_and_how_much() -> None:
    surprise = mask_statistics.judge_rate(draw(0.3), SEEN, 0.25)
    assert surprise.where == "all weights"
    # The standard deviation among 98,304 places is 0.0015.
    assert surprise.found == pytest.approx(0.7, abs=0.02)
    assert (surprise.expected, surprise.places) == (0.75, math.prod(SHAPE))
    alike = mask_statistics.judge_independence(np.repeat(draw(0.25, (1, *SHAPE[1:])), 4, axis=0), SEEN, 0.25)[0]
    assert alike.where.startswith("dropout keys ")
