"""Error bounds: what a careful evaluation in the working dtype reaches, structural zeros, and how bounds scale."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import ml_dtypes
import numpy as np
import pytest

from cases.case_id import parse_case_id
from cases.masks import Dense
from cases.operand_values import Cotangent, Problem, draw_cotangent, draw_problem
from conformance.truth import oracle
from conformance.truth.comparison import compare
from conformance.truth.rounding_bounds import Bounded, Expectation, compute_expectation
from conformance.truth.roundoff import UNIT_ROUNDOFF, U, compute_gamma, get_dtype_name
from impls.contract.declarations import Arithmetic
from tests.comparison_asserts import LIMIT, assert_right, compute_float64_bounds

CASES = (
    "train/f32/B2.T40.S56.N4.K2.H16.V24/causal-o16/sinks/normal/s1",
    "train/f32/B1.T64.S64.N2.K2.H16.V16/window-l9-r3/large/s2",
    "train/f32/B2.T40.S56.N6.K2.H16.V8/densehead-d40/softcap2/sinks/bias/scale0.3/knee/s3",
    "train/f32/B1.T40.S300.N2.K1.H32.V32/full/cancel/s4",
    "train/f32/B1.T48.S48.N2.K2.H16.V16/causal/seg/dominant/s5",
    "train/f32/B1.T40.S40.N2.K2.H16.V16/full/huge/s6",
    "train/bf16/B2.T40.S56.N4.K2.H16.V24/causal-o16/sinks/normal/s1",
    "train/bf16/B2.T40.S56.N6.K2.H16.V8/densehead-d40/softcap2/sinks/biaskey/knee/s3",
    "train/bf16/B1.T48.S48.N2.K1.H16.V16/chunked-17/heavy/s7",
    "train/f16/B1.T48.S48.N2.K2.H16.V16/causal/biashead/ties/s8",
)
F32 = np.float32
Values = dict[str, np.ndarray]


def rounded_forward(problem: Problem, cotangent: Cotangent, largest_tanh: float = 1.0) -> Values:
    """Flash-custom attention, every operation in f32, probabilities and dz rounded to the operands' dtype."""
    dtype = problem.q.dtype
    batch, q_length, heads, _ = problem.q.shape
    group = heads // problem.k.shape[2]
    full = (batch, heads, q_length, problem.k.shape[1])
    allowed = np.broadcast_to(problem.allowed, full)
    # [B, N, length, depth]
    q, do = (x.astype(F32).transpose(0, 2, 1, 3) for x in (problem.q, cotangent.out))
    k, v = (np.repeat(x.astype(F32).transpose(0, 2, 1, 3), group, axis=1) for x in (problem.k, problem.v))
    assert cotangent.logsumexp is not None
    dlse, scale = cotangent.logsumexp[..., None], F32(problem.effective_scale)

    x = scale * (q @ k.swapaxes(2, 3))
    if problem.bias is not None:
        x = x + np.broadcast_to(problem.bias, full).astype(F32)
    bounds = F32(-largest_tanh), F32(largest_tanh)
    tanh = F32(0) if problem.soft_cap is None else np.clip(np.tanh(x / F32(problem.soft_cap)), *bounds)
    z = x if problem.soft_cap is None else F32(problem.soft_cap) * tanh
    z = np.where(allowed, z, F32(-np.inf))
    top = z.max(axis=-1, keepdims=True)
    sinks = None if problem.sinks is None else problem.sinks[:, None, None]
    pivot = top if sinks is None else np.maximum(top, sinks)
    pivot = np.where(np.isfinite(pivot), pivot, F32(0))
    weights = np.exp(z - pivot)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks - pivot)
    with np.errstate(divide="ignore"):
        lse = pivot + np.log(total)
    p = weights / np.where(total > 0, total, F32(1))
    rounded_p = p.astype(dtype).astype(F32)
    out = (rounded_p @ v).astype(dtype).astype(F32)

    d = (out * do).sum(axis=-1, keepdims=True)
    dx = p * (do @ v.swapaxes(2, 3) - d + dlse) * (1 - tanh**2)
    rounded_dx = dx.astype(dtype).astype(F32)
    by_group = (batch, heads // group, group, problem.k.shape[1], -1)
    dk = (scale * (rounded_dx.swapaxes(2, 3) @ q)).reshape(by_group).sum(axis=2)
    dv = (rounded_p.swapaxes(2, 3) @ do).reshape(by_group).sum(axis=2)
    found = {
        "out": out.transpose(0, 2, 1, 3).astype(dtype),
        "logsumexp": lse[..., 0],
        "max_logits": top[..., 0],
        "dq": (scale * (rounded_dx @ k)).transpose(0, 2, 1, 3).astype(dtype),
        "dk": dk.transpose(0, 2, 1, 3).astype(dtype),
        "dv": dv.transpose(0, 2, 1, 3).astype(dtype),
    }
    assert all(x.dtype in (dtype, F32) for x in found.values())
    if sinks is not None:
        found["dsinks"] = (np.exp(sinks - lse) * (dlse - d)).sum(axis=(0, 2, 3))
    if problem.bias is not None:
        axes = tuple(a for a in range(4) if problem.bias.shape[a] == 1)
        found["dbias"] = dx.sum(axis=axes, keepdims=True).astype(problem.bias.dtype)
    return found


def expected_of(case_id: str, arithmetic: Arithmetic = Arithmetic()) -> tuple[Problem, Cotangent, Expectation]:
    problem, drawn = draw_problem(parse_case_id(case_id)), draw_cotangent(parse_case_id(case_id))
    assert drawn.logsumexp is not None
    if problem.sinks is None:
        drawn = dataclasses.replace(drawn, logsumexp=np.where(problem.empty_rows, F32(0), drawn.logsumexp))
    return problem, drawn, compute_expectation(problem, arithmetic, [drawn])


def observables(expectation: Expectation) -> dict[str, np.ndarray]:
    return {name: x.bound for name, x in {**expectation.forward, **expectation.gradients[0]}.items()}


@pytest.mark.parametrize("case_id", CASES)
def test_a_careful_evaluation_in_the_working_dtype_stays_within_the_limit(case_id: str) -> None:
    problem, cotangent, expectation = expected_of(case_id)
    got = rounded_forward(problem, cotangent)
    expected = {**expectation.forward, **expectation.gradients[0]}
    assert set(got) == set(expected)
    ratios = {name: compare(got[name], bounded).ratio for name, bounded in expected.items()}
    assert not {name: r for name, r in ratios.items() if not r <= LIMIT}
    assert max(ratios.values()) > 0.05  # nor are the bounds so wide that they judge nothing


def test_a_row_of_one_key_may_have_a_gradient_at_the_flat_end_of_a_cap() -> None:
    """Exactly it has none: `dp` equals `D`. The largest `tanh` of XLA's unoptimised programs is below 1."""
    problem, drawn, _ = expected_of("train/f32/B2.T48.S48.N4.K2.H64.V64/causal/softcap0.5/large/s0")
    assert drawn.logsumexp is not None
    cotangent = dataclasses.replace(drawn, logsumexp=np.zeros_like(drawn.logsumexp))
    (expected,) = compute_expectation(problem, Arithmetic(), [cotangent]).gradients
    got = rounded_forward(problem, cotangent, largest_tanh=1 - 2.0**-24)["dq"]
    assert not expected["dq"].value[:, 0].any()
    assert got[:, 0].any()
    assert compare(got, expected["dq"]).ratio <= LIMIT


@pytest.mark.parametrize("case_id", CASES[:5])
def test_a_scale_wrong_by_a_thousandth_is_beyond_the_limit_in_f32(case_id: str) -> None:
    problem, cotangent, expectation = expected_of(case_id)
    wrong = dataclasses.replace(problem, scale=problem.effective_scale * 1.001)
    got = rounded_forward(wrong, cotangent)
    assert compare(got["logsumexp"], expectation.forward["logsumexp"]).ratio > LIMIT
    assert compare(got["dq"], expectation.gradients[0]["dq"]).ratio > LIMIT


@pytest.mark.parametrize("case_id", CASES)
def test_the_exact_values_are_the_oracles(case_id: str) -> None:
    problem, cotangent, expectation = expected_of(case_id)
    forward = oracle.compute_forward(problem)
    for name, bounded in expectation.forward.items():
        np.testing.assert_array_equal(bounded.value, getattr(forward, name))
    gradients = oracle.compute_backward(problem, cotangent.out, cotangent.logsumexp)
    assert_right(gradients, compute_float64_bounds(expectation.gradients[0], computations=2))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_bounds_are_zero_exactly_where_the_structure_makes_the_value_zero(dtype: str) -> None:
    problem, _, expectation = expected_of(f"train/{dtype}/B2.T20.S30.N4.K2.H8.V6/densehead-d40/sinks/bias/normal/s3")
    bounds = observables(expectation)
    values = {name: x.value for name, x in {**expectation.forward, **expectation.gradients[0]}.items()}
    dead = problem.dead_keys[..., None]
    assert dead.any()
    empty = problem.empty_rows
    allowed = np.broadcast_to(problem.allowed, bounds["dbias"].shape)
    zeros = {
        "dk": np.broadcast_to(dead, bounds["dk"].shape),
        "dv": np.broadcast_to(dead, bounds["dv"].shape),
        "dbias": ~allowed,
        "dq": np.broadcast_to(empty.transpose(0, 2, 1)[..., None], bounds["dq"].shape),
        "out": np.broadcast_to(empty.transpose(0, 2, 1)[..., None], bounds["out"].shape),
        "max_logits": empty,
        "logsumexp": np.zeros(empty.shape, bool),
        "dsinks": np.zeros(4, bool),
    }
    for name, bound in bounds.items():
        assert (bound[zeros[name]] == 0).all(), name
        assert (bound[~zeros[name]] > 0).all(), name
        assert np.isfinite(bound).all(), name
        if name != "max_logits":
            assert (values[name][zeros[name]] == 0).all(), name


def test_rows_without_a_cotangent_have_no_gradient_and_no_bound() -> None:
    case_id = "train/f32/B2.T20.S30.N4.K2.H8.V6/causal-o10/sinks/bias/normal/s3"
    problem, cotangent = draw_problem(parse_case_id(case_id)), draw_cotangent(parse_case_id(case_id))
    out = np.zeros_like(cotangent.out)
    out[:, 4, 1] = cotangent.out[:, 4, 1]
    only, none = compute_expectation(
        problem, Arithmetic(), [Cotangent("row", out), Cotangent("none", 0 * out)]
    ).gradients
    assert not any(x.value.any() or x.bound.any() for x in none.values())
    touched = np.all(only["dq"].bound > 0, axis=-1)
    assert touched[:, 4, 1].all()
    assert touched.sum() == 2
    assert not (only["dq"].bound[~touched]).any()
    assert not only["dv"].bound[:, 15:].any()
    assert not only["dv"].bound[:, :, 1].any()
    assert_right(oracle.compute_backward(problem, out), compute_float64_bounds(only, computations=2))


@pytest.mark.parametrize("sinks", ["", "/sinks"])
def test_empty_rows_expect_zero_minus_infinity_and_an_exact_match(sinks: str) -> None:
    problem = draw_problem(parse_case_id(f"train/f32/B1.T3.S4.N2.K2.H2.V2/full{sinks}/normal/s0"))
    hidden = np.ones((3, 4), bool)
    hidden[1] = False
    problem = dataclasses.replace(problem, mask=Dense(hidden))
    forward = compute_expectation(problem, Arithmetic()).forward
    assert (forward["out"].value[:, 1] == 0).all()
    assert (forward["out"].bound[:, 1] == 0).all()
    assert (forward["max_logits"].value[..., 1] == -np.inf).all()
    lse = forward["logsumexp"]
    if problem.sinks is None:
        assert (lse.value[..., 1] == -np.inf).all()
        assert (lse.bound[..., 1] == 0).all()
    else:
        np.testing.assert_array_equal(lse.value[0, :, 1], problem.sinks)  # the logarithm of 1 is added
        assert (lse.bound[..., 1] > 0).all()
    mean = compute_expectation(problem, Arithmetic(), empty_rows="mean").forward["out"]
    expected = np.zeros((2, 2)) if sinks else problem.v.astype(np.float64).mean(axis=1)[0]
    row = Bounded(mean.value[0, 1], mean.bound[0, 1])
    assert_right({"out": expected}, compute_float64_bounds({"out": row}, computations=2))
    assert (mean.bound[:, 1] > 0).all() == (not sinks)


def test_reduced_products_widen_the_bounds_in_proportion_to_their_roundoff() -> None:
    case_id = CASES[0]
    exact, tf32, bf16 = (
        observables(expected_of(case_id, Arithmetic(products=x))[2]) for x in ("exact", "tf32", "bf16")
    )
    # A bound grows with the roundoff of products in proportion, but where it is in `expm1`: there by up to the
    # exponential of the argument, which is at most what the largest logit and the logsumexp are off by.
    step = (UNIT_ROUNDOFF["bf16"] - U / 2) / (UNIT_ROUNDOFF["tf32"] - U / 2)
    most = np.exp(bf16["max_logits"].max() + bf16["logsumexp"].max() + 2 * U)
    assert most < 1.15
    for name in exact:
        grown = (bf16[name] - exact[name]).sum() / (tf32[name] - exact[name]).sum()
        added = 2.0**-53 * exact[name].size * 4  # rounding of the four sums, of positive numbers
        assert step * (1 - added) <= grown <= step * most, name
        assert (tf32[name] >= exact[name]).all()
        assert tf32[name].sum() > 100 * exact[name].sum()


@pytest.mark.parametrize("products", ["exact", "bf16"])
def test_the_rounding_of_dp_counts_where_it_cancels_against_d(products: Literal["exact", "bf16"]) -> None:
    problem, cotangent, _ = expected_of(CASES[4])
    # With q = 0 the probabilities are exact, and with nearly equal values dp - D is small against dp.
    problem = dataclasses.replace(problem, q=np.zeros_like(problem.q), v=3 + problem.v * F32(0.05))
    rounded = ml_dtypes.bfloat16 if products == "bf16" else np.float16
    operands = dataclasses.replace(problem, v=problem.v.astype(rounded))
    got = oracle.compute_backward(operands, cotangent.out.astype(rounded))["dq"]
    only_out = dataclasses.replace(cotangent, logsumexp=None)
    expected = compute_expectation(problem, Arithmetic(products=products), [only_out]).gradients[0]["dq"]
    found = compare(got, expected)
    assert (found.ratio <= LIMIT) == (products == "bf16")
    assert found.ratio > 0.02


@pytest.mark.parametrize(
    ("changes", "wider"),
    [
        ({"logits": "input"}, {"out", "logsumexp", "max_logits", "dq", "dk", "dv", "dsinks", "dbias"}),
        ({"scaled_q": True}, {"out", "logsumexp", "max_logits", "dq", "dk", "dv", "dsinks", "dbias"}),
        ({"residuals": "input"}, {"logsumexp", "max_logits"}),
    ],
)
def test_each_declared_rounding_widens_what_it_reaches_and_nothing_else(
    changes: dict[str, Any], wider: set[str]
) -> None:
    case_id = "train/bf16/B2.T20.S24.N4.K2.H16.V8/causal-o4/sinks/biaskey/scale0.3/normal/s1"
    plain = observables(expected_of(case_id)[2])
    changed = observables(expected_of(case_id, dataclasses.replace(Arithmetic(), **changes))[2])
    assert {name for name in plain if (changed[name] > plain[name]).any()} == wider
    assert all((changed[name] >= plain[name]).all() for name in plain)
    in_f32 = case_id.replace("bf16", "f32")
    if "scaled_q" not in changes:
        f32 = observables(expected_of(in_f32)[2])
        same = observables(expected_of(in_f32, dataclasses.replace(Arithmetic(), **changes))[2])
        assert all(np.array_equal(same[name], f32[name]) for name in f32)


def test_probabilities_kept_in_f32_narrow_the_bounds_of_sixteen_bit_operands() -> None:
    case_id = CASES[6]
    rounded = observables(expected_of(case_id)[2])
    kept = observables(expected_of(case_id, Arithmetic(probabilities="f32"))[2])
    assert all((kept[name] <= rounded[name]).all() for name in rounded)
    assert all((kept[name] < rounded[name]).any() for name in ("out", "dq", "dk", "dv"))


def test_a_scale_that_is_a_power_of_two_rounds_nothing() -> None:
    case_id = "train/bf16/B1.T20.S24.N2.K2.H16.V8/full/normal/s1"  # 1 / sqrt(16)
    plain, scaled = (observables(expected_of(case_id, Arithmetic(scaled_q=x))[2]) for x in (False, True))
    assert all(np.array_equal(plain[name], scaled[name]) for name in plain)


def test_bounds_do_not_depend_on_the_units_of_v() -> None:
    problem, cotangent, _ = expected_of(CASES[0])
    bigger = dataclasses.replace(problem, v=problem.v * np.float32(1024))
    scaled = compute_expectation(bigger, Arithmetic(), [dataclasses.replace(cotangent, logsumexp=None)])
    plain = compute_expectation(problem, Arithmetic(), [dataclasses.replace(cotangent, logsumexp=None)])
    # Exactly: a power of two goes through every rounding, and the underflow floor is nothing beside these bounds.
    np.testing.assert_array_equal(scaled.forward["out"].bound, 1024 * plain.forward["out"].bound)
    np.testing.assert_array_equal(scaled.gradients[0]["dq"].bound, 1024 * plain.gradients[0]["dq"].bound)
    np.testing.assert_array_equal(scaled.gradients[0]["dv"].bound, plain.gradients[0]["dv"].bound)


def test_unit_roundoffs_are_those_of_the_dtypes() -> None:
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        eps = float(ml_dtypes.finfo(dtype).eps)
        assert UNIT_ROUNDOFF[get_dtype_name(np.dtype(dtype))] == eps / 2
    assert compute_gamma(1) == compute_gamma(16) == UNIT_ROUNDOFF["f32"]
    assert compute_gamma(1600) == 10 * UNIT_ROUNDOFF["f32"]
