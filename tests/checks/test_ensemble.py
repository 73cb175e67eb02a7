"""Tests of the check `ensemble`, and of the expected spread by simulated roundings."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.case_id import parse_case_id
from cases.ensemble_cases import select_ensemble_cases, select_plain_cases
from cases.operand_values import DTYPES, Cotangent, Problem, draw_cotangent, draw_problem
from conformance.checks import CHECKS_BY_NAME
from conformance.checks.ensemble import compute_statistics
from conformance.execution import implementation_registry
from conformance.execution.plain_functions import build_implementation
from conformance.judging import run_plan
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from conformance.truth.error_variance import ErrorVariance, Maximum, compute_error_variance, compute_ulp
from impls.contract.declarations import Arithmetic
from impls.contract.implementation import Implementation
from reports.records import FAIL, PASS, Record
from tests.kernels import low_precision_attention, naive, online_softmax
from tests.kernels.low_precision_attention import Roundings, round_to_nearest, round_towards_zero

CASE = "train/{}/B1.T128.S512.N8.K1.H64.V64/full/normal/s0"
DIGITS = ("bf16", "f16")


def judge(implementation: Implementation, dtype: str, seed: int = 0) -> dict[str, Record]:
    """Return the records of the check by observable.

    Failures are not rejudged, which would take seven times as long.
    """
    [case] = [case for case in select_plain_cases(seed, implementation.supports) if case.dtype == dtype]
    planned = run_plan.plan_case(implementation, case, [CHECKS_BY_NAME["ensemble"]])
    return {record.observable: record for record in Runner(Settings(), confirmed=0).run(planned.jobs)}


def find_failures(roundings: Roundings, dtype: str) -> dict[str, Record]:
    found = judge(build_implementation(low_precision_attention.build_kernel(roundings), "kernel"), dtype)
    return {name: record for name, record in found.items() if record.verdict != PASS}


def get_ratio(record: Record) -> float:
    assert record.ratio is not None
    return record.ratio


@pytest.mark.long
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        (naive.attention, "bf16"),
        (online_softmax.attention, "f16"),
        (low_precision_attention.build_kernel(Roundings()), "bf16"),
    ],
)
def test_correct_kernels_pass_far_from_the_limits(kernel: Any, dtype: str) -> None:
    found = judge(build_implementation(kernel, "kernel"), dtype)
    statistics = {f"{name}.{what}" for name in ("out", "dq", "dk", "dv") for what in ("bias", "spread")}
    wide = {f"{name}.wide_sums" for name in ("dq", "dk", "dv") if dtype == "f16"}
    assert found.keys() == statistics | wide
    assert {record.verdict for record in found.values()} == {PASS}
    assert max(get_ratio(record) for name, record in found.items() if name.endswith("spread")) < 1.02
    assert max(get_ratio(record) for name, record in found.items() if name.endswith("bias")) < 0.015


def divide_afterwards(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
    """Compute attention whose weights are rounded before they are divided, and whose maximum is differentiated too."""
    z = q.shape[-1] ** -0.5 * jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
    z = jnp.where(jnp.tri(q.shape[1], k.shape[1], dtype=bool), z, -jnp.inf) if causal else z
    weights = jnp.exp(z - z.max(axis=-1, keepdims=True))
    out = jnp.einsum("bnts,bsnv->btnv", weights.astype(q.dtype), v, preferred_element_type=jnp.float32)
    return (out / weights.sum(axis=-1).swapaxes(1, 2)[..., None]).astype(q.dtype)


def test_a_differentiated_maximum_passes_where_roundings_stand_out() -> None:
    """The key with the maximum gets the errors of its whole row: without a term for them, dk has a spread of 1.32."""
    implementation = build_implementation(divide_afterwards, "kernel")
    case = parse_case_id("train/bf16/B1.T512.S512.N2.K2.H64.V64/causal/aligned/s0")
    planned = run_plan.plan_case(implementation, case, [CHECKS_BY_NAME["ensemble"]])
    found = {record.observable: record for record in Runner(Settings(), confirmed=0).run(planned.jobs)}
    assert {record.verdict for record in found.values()} == {PASS}
    assert 0.9 < get_ratio(found["dk.spread"]) < 1.02  # as for other correct kernels


@pytest.mark.parametrize(("observable", "dtype"), [("out", "f16"), ("dq", "bf16")])
def test_truncation_is_a_bias_of_minus_one(observable: str, dtype: str) -> None:
    found = find_failures(Roundings(**{observable: round_towards_zero}), dtype)
    assert f"{observable}.bias" in found
    record = found[f"{observable}.bias"]
    # Tolerance: six standard errors, of up to 0.004 (`conformance.checks.ensemble`).
    assert record.ratio == pytest.approx(1, abs=6 * 0.004)
    assert record.reason.startswith("errors lean towards zero by 1")
    assert record.reason.endswith("truncation instead of rounding")
    assert all(name.startswith(observable) for name in found)


@pytest.mark.long
@pytest.mark.parametrize(
    ("step", "dtype", "shows"),
    [
        ("accumulator", "bf16", {"out.spread"}),
        ("total", "f16", {"out.spread"}),
        ("dq_sum", "bf16", {"dq.spread"}),
        ("group_sum", "f16", {"dk.spread", "dv.spread"}),
    ],
)
def test_rounding_at_every_step_of_a_sum_is_a_spread(step: str, dtype: str, shows: set[str]) -> None:
    found = find_failures(Roundings(**{step: round_to_nearest}), dtype)
    assert shows <= found.keys()
    assert all(found[name].verdict == FAIL and get_ratio(found[name]) > 1.11 for name in shows)
    assert all("instead of being accumulated in f32?" in found[name].reason for name in shows)


def test_a_gradient_that_is_always_a_little_too_large_is_a_bias() -> None:
    def forward(q: Any, k: Any, v: Any) -> Any:
        out, pullback = jax.vjp(naive.attention, *(x.astype(jnp.float32) for x in (q, k, v)))
        return out.astype(q.dtype), pullback

    def backward(pullback: Any, do: Any) -> Any:
        return tuple((1.0003 * x).astype(do.dtype) for x in pullback(do.astype(jnp.float32)))

    attend = jax.custom_vjp(lambda q, k, v: forward(q, k, v)[0])
    attend.defvjp(forward, backward)
    found = judge(build_implementation(lambda q, k, v: attend(q, k, v), "kernel"), "bf16")
    leaning = {name for name, record in found.items() if record.verdict == FAIL}
    assert leaning == {"dq.bias", "dk.bias", "dv.bias"}
    assert "away from zero" in found["dq.bias"].reason


def test_errors_that_all_rows_of_a_problem_share_are_one_error() -> None:
    """Each of six problems shifts all its rows by one random error; the bias must stay insignificant."""
    rng = np.random.default_rng(0)
    value = 1.0 + rng.random((200, 64))
    exact = ErrorVariance(value=value, variance=np.ones_like(value), ulp=np.full_like(value, 2.0**-9))
    pairs = [(value + 0.1 * 2.0**-10 * shared, exact) for shared in rng.standard_normal(6)]
    found = compute_statistics(pairs)
    assert 0.02 < found.standard_error < 0.07  # 0.1 / sqrt(6), of six draws
    assert abs(found.bias) < 3 * found.standard_error


def test_results_that_are_not_finite_fail() -> None:
    found = judge(build_implementation(lambda q, k, v: naive.attention(q, k, v).at[0, 3].set(np.nan), "kernel"), "bf16")
    assert found["out.bias"].verdict == found["out.spread"].verdict == FAIL
    assert found["out.spread"].reason == "some results are not finite"


def test_there_is_a_case_for_what_is_supported() -> None:
    def cases(**unsupported: str) -> list[str]:
        declared = dataclasses.replace(
            implementation_registry.find_implementation("dot_product"), unsupported=unsupported
        )
        return [case.id for case in select_plain_cases(3, declared.supports)]

    assert cases() == [CASE.format(dtype).replace("s0", "s3") for dtype in DIGITS]
    assert cases(f16="no", mqa="no") == ["train/bf16/B1.T128.S512.N8.K2.H64.V64/full/normal/s3"]
    assert cases(bf16="no", mqa="no", gqa="no") == ["train/f16/B1.T128.S512.N2.K2.H64.V64/full/normal/s3"]
    assert cases(bf16="no", train="no") == ["prefill/f16/B1.T128.S512.N8.K1.H64.V64/full/normal/s3"]
    assert cases(bf16="no", f16="no") == []


def test_windows_decoding_and_many_queries_are_asked_about_where_they_are_supported() -> None:
    kernel = implementation_registry.find_implementation("dot_product")
    assert [case.id for case in select_ensemble_cases(3, kernel.supports)[2:5]] == [
        "train/bf16/B1.T512.S512.N4.K2.H64.V64/window-l80-r0/normal/s3",
        "decode/bf16/B1.T1.S1024.N32.K4.H64.V64/window-l959-r0-o1023/normal/s3",
        "train/bf16/B1.T1152.S256.N2.K2.H64.V64/full/normal/s3",
    ]
    lacking = dataclasses.replace(kernel, unsupported={"window": "no", "decode": "no", "unequal_lengths": "no"})
    found = select_ensemble_cases(3, lacking.supports)
    assert {case.distribution for case in found[2:]} == {"aligned", "opposed", "rising"}


def test_values_that_make_roundings_stand_out_are_asked_about_under_masks_over_caches_and_in_both_dtypes() -> None:
    kernel = implementation_registry.find_implementation("dot_product")
    found = select_ensemble_cases(3, kernel.supports)[5:]
    asked = {(case.phase, case.dtype, case.mask, case.bias, case.distribution) for case in found}
    assert asked == {
        ("train", "bf16", "causal", None, "aligned"),
        ("train", "bf16", "causal", None, "opposed"),
        ("train", "bf16", "causal", "biaskey", "opposed"),
        ("train", "f16", "causal", None, "opposed"),
        ("train", "f16", "full", None, "rising"),
        ("decode", "bf16", "full", None, "opposed"),
        ("decode", "bf16", "full", None, "rising"),
        ("decode", "f16", "full", None, "aligned"),
    }
    assert all(case.seed == 3 for case in found)
    lacking = dataclasses.replace(kernel, unsupported={"bias": "no", "f16": "no", "train": "no"})
    assert [case.phase for case in select_ensemble_cases(3, lacking.supports)[-1:]] == ["decode"]
    assert all(case.bias is None and case.dtype == "bf16" for case in select_ensemble_cases(3, lacking.supports))


@pytest.mark.parametrize(
    ("name", "storage"),
    [
        ("paged", "paged16"),
        ("paged_latent", "latent16"),
        ("block_flash_packed", "packed"),
        ("block_flash_latent", "latent"),
    ],
)
def test_stored_operands_are_asked_about(name: str, storage: str) -> None:
    kernel = implementation_registry.find_implementation(name)
    asked = [case for case in select_ensemble_cases(3, kernel.supports) if case.storage == storage]
    assert "opposed" in {case.distribution for case in asked}


def test_opposed_values_of_latents_are_part_of_them_and_hardly_move_the_logits() -> None:
    case, *_ = select_ensemble_cases(3, implementation_registry.find_implementation("paged_latent").supports)
    problem = draw_problem(case)
    np.testing.assert_array_equal(problem.v, problem.k[..., : case.v_head_dim])
    chunks = problem.v.astype(np.float64).reshape(8, -1, case.v_head_dim).mean(axis=1)
    assert (np.abs(chunks) > 3).all()
    assert (np.abs(chunks.mean(axis=0)) < 0.5).all()
    # The values' share of a logit: about 0.1, beside 1 for all others.
    q, k = (x.astype(np.float64)[..., : case.v_head_dim] for x in (problem.q[0, 0], problem.k[0, :, 0]))
    assert 0 < (problem.effective_scale * q @ k.T).std() < 0.3


@pytest.mark.parametrize("from_the_end", [False, True])
@pytest.mark.parametrize(
    ("shape", "arithmetic"),
    [
        ("B1.T512.S32.N2.K2.H16.V64", Arithmetic(block_sums=64, probabilities="f32")),
        ("B1.T32.S32.N8.K1.H16.V64", Arithmetic(group_sums="input", probabilities="f32")),
    ],
)
def test_a_sum_that_is_rounded_on_the_way_may_begin_at_either_end(
    shape: str, arithmetic: Arithmetic, from_the_end: bool
) -> None:
    squares = []
    for seed in range(4):
        case = parse_case_id(f"train/bf16/{shape}/full/normal/s{seed}")
        problem, cotangent = draw_problem(case), draw_cotangent(case)
        rounded = lambda x, dtype=problem.v.dtype: x.astype(dtype).astype(np.float64)  # noqa: E731 -- to nearest
        q, k, do = (x[0].astype(np.float64) for x in (problem.q, problem.k, cotangent.out))
        z = problem.effective_scale * np.einsum("tngh,snh->ngts", q.reshape(len(q), k.shape[1], -1, q.shape[2]), k)
        p = np.exp(z - z.max(axis=-1, keepdims=True))
        p = (p / p.sum(axis=-1, keepdims=True)).reshape(q.shape[1], len(q), len(k))  # [N, T, S]
        block = arithmetic.block_sums or len(q)
        p, do = p.reshape(len(p), -1, block, len(k)), do.reshape(-1, block, *do.shape[1:])
        parts = np.einsum("nbts,btnv->nbsv", p, do)  # of each head, or of each block
        parts = parts.swapaxes(0, 1) if arithmetic.block_sums else parts
        total = np.zeros(parts.shape[1:])
        for part in parts[::-1] if from_the_end else parts:
            total = rounded(total + rounded(part))
        exact = compute_error_variance(problem, arithmetic, Cotangent("random", cotangent.out))["dv"]
        value, variance = (x[0].swapaxes(0, 1) for x in (exact.value, exact.variance))
        squares.append(np.mean((total - value) ** 2 / variance))
    # The range around 1 is needed since sums of rounded numbers are often ties, whose error is above average.
    assert 0.9 < np.sqrt(np.mean(squares)) < 1.05


def simulate(
    problem: Problem, cotangent: Cotangent, *, logits: bool, fused: bool, maximum: bool = False
) -> dict[str, np.ndarray]:
    """Compute attention in float64 with only the roundings of the model.

    Args:
      problem: the operands.
      cotangent: the cotangent of `out`.
      logits: whether logits are rounded.
      fused: whether D is computed from the stored out.
      maximum: whether D comes from rounded weights, and the derivative of each row's maximum is added.
    """
    dtype, scale = problem.q.dtype, problem.effective_scale
    rounded = lambda x: x.astype(dtype).astype(np.float64)  # noqa: E731 -- to nearest
    q, k, v, do = (x.astype(np.float64) for x in (problem.q, problem.k, problem.v, cotangent.out))
    group = q.shape[2] // k.shape[2]
    q, do = (x.transpose(0, 2, 1, 3) for x in (q, do))
    k, v = (np.repeat(x.transpose(0, 2, 1, 3), group, axis=1) for x in (k, v))
    z = scale * q @ k.swapaxes(2, 3)
    if problem.bias is not None:
        z = z + problem.bias.astype(np.float64)
    z = np.where(problem.allowed, rounded(z) if logits else z, -np.inf)
    p = np.exp(z - z.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    out = rounded(rounded(p) @ v)
    dp = rounded(do @ v.swapaxes(2, 3))
    d = (out * do).sum(axis=-1, keepdims=True) if fused else (p * dp).sum(axis=-1, keepdims=True)
    if maximum:
        d = (rounded(p) * (do @ v.swapaxes(2, 3))).sum(axis=-1, keepdims=True)
    dz = p * (dp - d)
    if maximum:
        dz = dz - (z == z.max(axis=-1, keepdims=True)) * dz.sum(axis=-1, keepdims=True)  # one key: z are not rounded
    dz = rounded(dz)

    def summed(x: np.ndarray) -> np.ndarray:
        batch, heads, *rest = x.shape
        return rounded(rounded(x).reshape(batch, heads // group, group, *rest).sum(axis=2)).transpose(0, 2, 1, 3)

    dk, dv = scale * dz.swapaxes(2, 3) @ q, rounded(p).swapaxes(2, 3) @ do
    dbias = {} if problem.bias is None else {"dbias": rounded(dz.sum(axis=(1, 2), keepdims=True))}
    return dbias | {
        "out": out.transpose(0, 2, 1, 3),
        "dq": rounded(scale * dz @ k).transpose(0, 2, 1, 3),
        "dk": summed(dk),
        "dv": summed(dv),
    }


@pytest.mark.parametrize(
    ("case", "logits"),
    [
        ("B2.T48.S96.N4.K2.H16.V24/full/normal", False),
        ("B2.T48.S96.N4.K2.H16.V24/full/normal", True),
        ("B1.T64.S128.N8.K1.H16.V16/causal-o64/normal", False),
        ("B1.T64.S128.N8.K1.H16.V16/causal-o64/normal", True),
        ("B2.T96.S128.N4.K2.H16.V16/full/biaskey/normal", False),
    ],
)
@pytest.mark.parametrize("dtype", DIGITS)
def test_the_model_agrees_with_simulated_roundings(case: str, logits: bool, dtype: str) -> None:
    for fused, maximum in ((False, False), (True, False), (False, True))[: 2 if logits else 3]:
        ratios = compute_mean_ratios(f"train/{dtype}/{case}", logits=logits, fused=fused, maximum=maximum)
        # Tolerance: 15% of a variance are 7% of a spread, less than the 10% by which SPREAD_LIMIT trusts the model.
        assert ratios == pytest.approx(dict.fromkeys(ratios, 1.0), rel=0.15, abs=0)


@pytest.mark.parametrize(
    "case",
    [
        "train/bf16/B1.T128.S128.N2.K2.H64.V64/causal/aligned",
        "train/f16/B1.T128.S128.N2.K2.H64.V64/causal/opposed",
        "train/bf16/B1.T96.S256.N2.K2.H16.V16/full/rising",
    ],
)
def test_the_model_covers_all_roundings_where_one_stands_out(case: str) -> None:
    ratios = compute_mean_ratios(case, logits=False, fused=True)
    # Tolerance: as above.
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1.0), rel=0.15, abs=0)
    ratios = compute_mean_ratios(case, logits=False, fused=False, maximum=True)
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1.0), rel=0.15, abs=0)  # Tolerance: as above
    # The model counts the rounding of `out` in D, which is not there if D is a sum of p dp.
    ratios = compute_mean_ratios(case, logits=False, fused=False)
    assert max(ratios.values()) < 1.15  # Tolerance: as above
    assert ratios["dq"] < 0.9


def compute_mean_ratios(case: str, *, logits: bool, fused: bool, maximum: bool = False) -> dict[str, float]:
    """Return the mean squared error of simulated roundings over its expectation, by result, over six seeds."""
    arithmetic = Arithmetic(logits="input" if logits else "f32")
    way: Maximum = "differentiated" if maximum else "constant"
    found: dict[str, list[float]] = {}
    for seed in range(6):
        drawn = parse_case_id(f"{case}/s{seed}")
        problem, cotangent = draw_problem(drawn), draw_cotangent(drawn)
        got = simulate(problem, cotangent, logits=logits, fused=fused, maximum=maximum)
        for name, exact in compute_error_variance(problem, arithmetic, cotangent, way).items():
            found.setdefault(name, []).append(float(np.mean(compute_relative_errors(got[name], exact))))
    return {name: float(np.mean(squares)) for name, squares in found.items()}


def compute_relative_errors(got: np.ndarray, exact: ErrorVariance) -> np.ndarray:
    """Return squared errors divided by expected variances; 0 where both are 0."""
    with np.errstate(invalid="ignore"):
        return np.where(got == exact.value, 0, (got - exact.value) ** 2 / exact.variance)


def test_the_expected_variance_is_that_of_either_derivative_of_the_maximum() -> None:
    case = parse_case_id("train/bf16/B2.T16.S24.N4.K2.H16.V16/causal-o8/biaskey/normal/s0")
    operands = draw_problem(case), Arithmetic(), draw_cotangent(case)
    constant = compute_error_variance(*operands, "constant")
    other = compute_error_variance(*operands, "differentiated")
    for name, exact in compute_error_variance(*operands).items():
        least = np.maximum(constant[name].variance, other[name].variance)
        # Heads of a group add the larger one each, so a sum over them may be above both.
        assert (exact.variance >= (1 - 1e-6) * least).all()  # Tolerance: variances of pairs are summed in f32
        assert (exact.variance <= (1 + 1e-6) * (constant[name].variance + other[name].variance)).all()


@pytest.mark.parametrize("dtype", DIGITS)
def test_ulp_is_the_distance_to_the_next_number(dtype: str) -> None:
    values = np.array([1.0, 1.3, 1.99, 2.0, 3e-5, 7e-4, 0.2, 250.0]).astype(DTYPES[dtype])
    bits = values.view(np.uint16)
    above = (bits + 1).view(DTYPES[dtype]).astype(np.float64)
    np.testing.assert_array_equal(compute_ulp(values.astype(np.float64), dtype), above - values.astype(np.float64))


def test_what_the_model_does_not_cover_is_said() -> None:
    capped = draw_problem(parse_case_id("train/bf16/B1.T8.S8.N1.K1.H16.V16/full/softcap2/normal/s0"))
    with pytest.raises(ValueError, match="derived for logits"):
        compute_error_variance(capped, Arithmetic())
    biased = draw_problem(parse_case_id("train/bf16/B1.T8.S8.N1.K1.H16.V16/full/bias/normal/s0"))
    with pytest.raises(ValueError, match="vary over keys and be bfloat16, got float32"):
        compute_error_variance(biased, Arithmetic())
    biased = draw_problem(parse_case_id("train/bf16/B1.T8.S8.N1.K1.H16.V16/full/biaskey/normal/s0"))
    with pytest.raises(ValueError, match="added to rounded logits"):
        compute_error_variance(biased, Arithmetic(logits="input"))
    with pytest.raises(ValueError, match="bf16, f16 only, got operands in f32"):
        compute_error_variance(
            draw_problem(parse_case_id("train/f32/B1.T8.S8.N1.K1.H16.V16/full/normal/s0")), Arithmetic()
        )
    latent = parse_case_id("train/bf16/B1.T8.S8.N1.K1.H24.V16/full/latent/normal/s0")
    with pytest.raises(ValueError, match="gradients of latents"):
        compute_error_variance(draw_problem(latent), Arithmetic(), draw_cotangent(latent))
    with pytest.raises(ValueError, match="power of two"):
        compute_error_variance(
            draw_problem(parse_case_id("train/bf16/B1.T8.S8.N1.K1.H32.V32/full/normal/s0")), Arithmetic(scaled_q=True)
        )
