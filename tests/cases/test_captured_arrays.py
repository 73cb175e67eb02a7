"""Test the score functions that capture a table, and the oracle's gradient of the table."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from cases.case_id import parse_case_id
from cases.operand_values import Problem, draw_cotangent, draw_problem
from cases.score_functions import CAPTURED, Buckets, TableScore, build_score
from conformance.truth import oracle

T, S, N = 40, 300, 3


def build(level: str) -> TableScore:
    score = build_score(level, num_q_heads=N, q_length=T, kv_length=S, spread=1.0)
    assert isinstance(score, TableScore)
    return score


def compute_t5_bucket(relative_position: int) -> int:
    """Compute the bucket as Raffel et al. define it, with 32 buckets for both directions, up to a distance of 128."""
    bucket, distance = (16 if relative_position > 0 else 0), abs(relative_position)
    if distance < 8:
        return bucket + distance
    return bucket + min(15, 8 + math.floor(math.log(distance / 8) / math.log(128 / 8) * 8 + 1e-9))


def test_buckets_are_those_of_t5() -> None:
    score = Buckets(step=1.0, offset=0)
    ahead = range(-400, 401)
    found = score.find_entries(np, np.zeros(801, int), np.array(ahead))
    assert list(found) == [compute_t5_bucket(each) for each in ahead]


@pytest.mark.parametrize("level", CAPTURED)
def test_a_function_with_its_leaf_computes_what_the_oracle_adds(level: str) -> None:
    score = build(level)
    table = score.draw_table(np.random.default_rng(0).normal(size=(score.num_entries, N)))
    x = np.random.default_rng(1).normal(size=(1, N, T, S)).astype(np.float32)
    places = np.ogrid[:1, :N, :T, :S]
    got = jax.jit(lambda function, x: function(x, *places))(Partial(score, score.get_leaf(jnp.asarray(table))), x)
    number = score.dense_table(table, T, S)
    exact = number * np.tanh(x / number) if score.caps else x + number
    # Tolerance: below 16, f32 rounds by 2**-21; there are four roundings, and a tanh that is off by seven units.
    np.testing.assert_allclose(got, exact, rtol=0, atol=2.0**-18)


@pytest.mark.parametrize("level", CAPTURED)
@pytest.mark.parametrize("more", ["", "/softcap2/sinks/biashead"])
def test_the_gradient_of_the_table_is_the_derivative_of_the_forward_pass(level: str, more: str) -> None:
    if level == "score-caps":
        more = more.replace("/softcap2", "")
    case = parse_case_id(f"train/f32/B2.T24.S32.N4.K2.H16.V16/causal-o8{more}/{level}/normal/s1")
    problem, drawn = draw_problem(case), draw_cotangent(case)
    assert drawn.logsumexp is not None
    assert problem.score_table is not None
    gradient = oracle.compute_backward(problem, drawn.out, drawn.logsumexp)["dscore_table"]
    table = problem.score_table.astype(np.float64)
    step = 1e-6 * np.random.default_rng(0).normal(size=table.shape)

    def loss(table: np.ndarray) -> float:
        found = oracle.compute_forward(dataclasses.replace(problem, score_table=table))
        return float((found.out * drawn.out).sum() + (found.logsumexp * drawn.logsumexp).sum())

    change = (loss(table + step) - loss(table - step)) / 2
    # The difference is off by the square of the step, and by the rounding of a loss of 1e3 over a change of 1e-6: 1e-7.
    assert change == pytest.approx((gradient * step).sum(), rel=1e-5)


def test_a_problem_without_its_score_has_no_table() -> None:
    problem: Problem = draw_problem(parse_case_id("train/f32/B1.T8.S8.N1.K1.H8.V8/full/score-slopes/normal/s0"))
    assert problem.score_table is not None
    assert problem.without("score_mod").score_table is None


@pytest.mark.parametrize("level", CAPTURED)
def test_a_table_follows_from_the_seed_and_the_function_does_not(level: str) -> None:
    one, other = (
        draw_problem(parse_case_id(f"train/f32/B1.T8.S8.N2.K2.H8.V8/full/{level}/normal/s{seed}")) for seed in (0, 1)
    )
    assert one.score_mod == other.score_mod
    first: Any = one.score_table
    assert (first != other.score_table).all()
