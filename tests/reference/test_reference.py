"""The reference attention in JAX against the oracle, with both backward passes, and what it refuses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.case_id import parse_case_id
from cases.masks import Causal, Dense
from cases.operand_values import Problem, draw_problem
from conformance import reference_attention
from conformance.check_api.subject import Subject
from conformance.execution.executor import Executor
from conformance.truth.comparison import compare
from conformance.truth.oracle import Backward
from conformance.truth.rounding_bounds import Bounded
from conformance.truth.tolerances import load_default_tolerances
from impls.contract.implementation import Implementation
from tests.comparison_asserts import assert_right, compute_float64_bounds

CASES = (
    "train/f32/B2.T24.S32.N4.K2.H8.V6/causal-o8/seg/softcap2/sinks/bias/scale0.3/alibi/normal/s1",
    "train/f32/B2.T24.S32.N2.K2.H8.V8/densehead-d40/biaskey/large/s2",
    "train/bf16/B3.T24.S24.N4.K1.H8.V8/causal_and_lengths-0-9-24/sinks/heavy/s3",
    "train/f32/B2.T24.S30.N4.K2.H8.V8/causal-o6/softcap5/sinks/bias/score-rows/normal/s5",
    "train/f32/B2.T24.S24.N2.K1.H8.V8/causal/score-cap/large/s6",
    "train/bf16/B1.T30.S30.N2.K2.H8.V8/window-l4-r2/softcap5/biashead/alibi/knee/s4",
)


OFFERED = frozenset({"alibi_slopes", "score_mod"})


def subject(case_id: str, backward: Backward) -> Subject:
    def call(*args: Any, **kwargs: Any) -> Any:
        return reference_attention(*args, **kwargs, backward=backward)

    implementation = Implementation(name=f"reference_{backward}", call=call, empty_rows="zero", offers=OFFERED)
    return Subject(Executor(implementation), parse_case_id(case_id), load_default_tolerances())


@pytest.mark.parametrize("backward", ["vanilla", "flash"])
@pytest.mark.parametrize("case_id", CASES)
def test_results_and_gradients_are_within_the_limits_of_the_oracle(case_id: str, backward: Backward) -> None:
    at = subject(case_id, backward)

    def beyond(values: Any, expected: dict[str, Bounded]) -> dict[str, float]:
        ratios = {name: compare(values[name], bounded).ratio for name, bounded in expected.items()}
        limit = at.tolerances.limit
        return {name: ratio for name, ratio in ratios.items() if not ratio <= limit(at.case.dtype, name).ratio}

    assert not beyond(at.residuals.values, at.expectation.forward)
    assert at.forward.values["out"].dtype == at.problem.q.dtype
    assert at.residuals.values["logsumexp"].dtype == np.float32
    np.testing.assert_array_equal(at.forward.values["out"], at.residuals.values["out"])
    for cotangent in ("random", "random_lse"):
        gradients = at.gradients(cotangent).values
        assert not beyond(gradients, at.get_expected_gradients(cotangent)), cotangent
        assert gradients["dq"].dtype == at.problem.q.dtype


@pytest.mark.parametrize("backward", ["vanilla", "flash"])
def test_float64_operands_are_computed_in_float64(backward: Backward) -> None:
    problem = draw_problem(parse_case_id("train/f32/B1.T6.S8.N2.K1.H4.V4/causal-o2/normal/s1"))
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(x, jnp.float64) for x in (problem.q, problem.k, problem.v))
        out = reference_attention(q, k, v, mask=Causal(2), backward=backward)
        assert out.dtype == jnp.float64
        expected = subject("train/f32/B1.T6.S8.N2.K1.H4.V4/causal-o2/normal/s1", backward).expectation.forward["out"]
        assert_right({"out": out}, compute_float64_bounds({"out": expected}, computations=2))


@pytest.mark.parametrize("backward", ["vanilla", "flash"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_nobody_may_attend_to_reaches_no_gradient(backward: Backward, poison: float) -> None:
    hidden = np.ones((4, 5), bool)
    hidden[:, 3:] = False
    problem = draw_problem(parse_case_id("train/f32/B1.T4.S5.N2.K1.H4.V4/full/normal/s1"))

    def gradients(k: np.ndarray, v: np.ndarray) -> Any:
        def loss(*operands: jax.Array) -> jax.Array:
            return reference_attention(*operands, mask=Dense(hidden), backward=backward).sum()

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(problem.q, k, v)

    k, v = problem.k.copy(), problem.v.copy()
    k[:, 3:] = v[:, 3:] = poison
    clean, dirty = gradients(problem.k, problem.v), gradients(k, v)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    assert not np.asarray(dirty[1][1][:, 3:]).any()


@pytest.mark.parametrize("backward", ["vanilla", "flash"])
def test_a_mask_by_function_is_the_mask_that_it_says(backward: Backward) -> None:
    problem = draw_problem(parse_case_id("train/f32/B2.T6.S9.N4.K2.H4.V4/full/normal/s1"))
    q, k, v = map(jnp.asarray, (problem.q, problem.k, problem.v))
    b, n, i, j = np.ogrid[:2, :4, :6, :9]

    def seen(b: Any, n: Any, i: Any, j: Any) -> Any:
        return (j <= i + n) & (j != 2 * b)

    def gradients(**mask: Any) -> Any:
        def loss(*operands: jax.Array) -> jax.Array:
            return (reference_attention(*operands, **mask, backward=backward) ** 2).sum()

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(q, k, v)

    assert not seen(b, n, i, j).all(axis=(2, 3)).any()
    by_array = gradients(mask=Causal(4) & Dense(seen(b, n, i, j)))
    jax.tree.map(np.testing.assert_array_equal, gradients(mask=Causal(4), mask_mod=seen), by_array)


def test_what_is_no_function_is_refused() -> None:
    for name in ("mask_mod", "score_mod"):
        wrong: dict[str, Any] = {name: 3}
        with pytest.raises(TypeError, match=f"{name} must be a function"):
            reference_attention(**operands(), **wrong)


def test_max_logits_carry_no_gradient() -> None:
    problem = draw_problem(parse_case_id("train/f32/B1.T4.S5.N2.K1.H4.V4/full/normal/s1"))

    q, k, v = map(jnp.asarray, (problem.q, problem.k, problem.v))

    def top(q: jax.Array) -> jax.Array:
        return reference_attention(q, k, v, save_residuals=True)[1]["max_logits"].sum()

    assert not np.asarray(jax.grad(top)(q)).any()


def operands() -> dict[str, Any]:
    problem: Problem = draw_problem(parse_case_id("train/f32/B2.T4.S5.N4.K2.H8.V6/full/normal/s1"))
    return {name: jnp.asarray(getattr(problem, name)) for name in "qkv"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": jnp.zeros((2, 4, 8))}, r"q must have 4 axes, .* got shape \(2, 4, 8\)"),
        ({"q": jnp.zeros((2, 4, 3, 8))}, "q has 3 heads, which must be a multiple of the 2 heads"),
        ({"q": jnp.zeros((3, 4, 4, 8))}, "k has batch size 2, q has 3"),
        ({"q": jnp.zeros((2, 4, 4, 7))}, "k has head_dim 8, q has 7"),
        ({"v": jnp.zeros((2, 6, 2, 6))}, "k and v must agree in batch, length and heads"),
        ({"q": jnp.zeros((2, 4, 4, 8), jnp.bfloat16)}, "one dtype, got bfloat16, float32 and float32"),
        ({"soft_cap": 0.0}, "soft_cap must be positive .* got 0.0"),
        ({"scale": -1.0}, "scale must be positive .* got -1.0"),
        ({"sinks": jnp.zeros(2)}, r"sinks must have shape \(4,\), .* got \(2,\)"),
        ({"alibi_slopes": jnp.zeros(2)}, r"alibi_slopes must have shape \(4,\), .* got \(2,\)"),
        ({"bias": jnp.zeros((4, 5))}, r"bias must have 4 axes broadcastable to \(2, 4, 4, 5\), got shape \(4, 5\)"),
        ({"bias": jnp.zeros((2, 4, 4, 4))}, r"bias must .* got shape \(2, 4, 4, 4\)"),
        ({"segment_ids": (jnp.zeros((2, 5)), jnp.zeros((2, 5)))}, r"segment_ids of q must have shape \(2, 4\)"),
        ({"segment_ids": (jnp.zeros((2, 4)), jnp.zeros((2, 4)))}, r"segment_ids of kv must have shape \(2, 5\)"),
        ({"backward": "exact"}, "backward must be 'vanilla' or 'flash', got 'exact'"),
        ({"mask": Dense(np.ones((4, 4), bool))}, r"mask array is for lengths \(4, 4\), the operands have T=4, S=5"),
    ],
)
def test_wrong_operands_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reference_attention(**{**operands(), **changes})
