"""Quantised caches of keys and values: stored numbers, memory, and attention over them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import quantization
from cases.case import CaseIdError
from cases.case_id import parse_case_id
from cases.operand_values import draw_problem
from cases.quantization import KV_CACHES
from conformance.check_api.subject import Subject
from conformance.execution import implementation_registry
from conformance.execution.executor import Executor
from conformance.truth import oracle
from conformance.truth.comparison import compare
from conformance.truth.rounding_bounds import OperandErrors, compute_expectation
from conformance.truth.tolerances import load_default_tolerances
from impls import jax_compat, quantized_kv
from impls.contract.declarations import Arithmetic

SETTINGS = settings(derandomize=True, deadline=None, max_examples=60)
CASE = "prefill/f32/B2.T8.S40.N4.K2.H16.V8/causal-o32/{}/normal/s3"


def keys(seed: int, size: int) -> np.ndarray:
    """Draw `[B, S, K, D]`, sometimes zeros, with magnitudes that differ from token to token."""
    numbers = np.random.default_rng(seed)
    x = numbers.standard_normal((2, 3, 2, 5)) * 2.0 ** numbers.integers(-size, size + 1, (2, 3, 2, 1))
    return np.where(numbers.random((2, 3, 2, 1)) < 0.2, 0.0, x).astype(np.float32)


@SETTINGS
@given(st.integers(0, 10**6), st.integers(0, 12), st.sampled_from(KV_CACHES))
def test_what_is_stored_is_within_half_a_step(seed: int, size: int, cache: str) -> None:
    x = keys(seed, size)
    stored, scales = quantization.quantize(x, cache)
    assert scales.shape == ((2, 3, 2) if cache.endswith("token") else (1, 1, 2))
    error = np.abs(x - quantization.dequantize(stored, scales))
    # The scale is rounded to f32, and the largest number with it: 127 scales are off by up to 254 * 2**-24 half steps.
    assert (error <= quantization.compute_half_steps(stored, scales) * (1 + 255 * 2.0**-24)).all()


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_our_cache_stores_what_the_cases_store(kind: Any) -> None:
    x = keys(1, 3)
    stored, scales = quantization.quantize(x, f"kv{kind}-token")
    ours, our_scales = quantized_kv.quantize(jnp.asarray(x), kind)
    # Tolerance: a division of one rounding on either side, of two in ours where it is by the reciprocal.
    np.testing.assert_allclose(our_scales, scales, rtol=3 * 2.0**-24, atol=0)
    assert ours.dtype == stored.dtype
    # Halfway between two numbers, a scale that differs in its last bit decides.
    difference = np.abs(quantization.dequantize(np.asarray(ours), scales) - quantization.dequantize(stored, scales))
    assert (difference <= 2 * quantization.compute_half_steps(stored, scales)).all()
    assert np.mean(difference > 0) < 0.02


@pytest.mark.parametrize("length", [8, 4096])
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_a_nan_makes_its_scale_nan_at_any_length(kind: Any, length: int) -> None:
    x = jnp.ones((1, length, 2, 64)).at[0, 3, 1, 5].set(jnp.nan)
    scales = np.asarray(quantized_kv.quantize(x, kind)[1])
    assert np.argwhere(np.isnan(scales)).tolist() == [[0, 3, 1]]


def test_given_scales_clip() -> None:
    x = jnp.full((1, 1, 1, 2), 10.0)
    stored, _ = quantized_kv.quantize(x, "int8", scales=jnp.full((1, 1, 1), 0.05))
    np.testing.assert_array_equal(stored, 127)
    with pytest.raises(ValueError, match="kind must be one of int8, int4, fp8, got 'int2'"):
        quantized_kv.quantize(x, "int2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"x must have 4 axes.*got shape \(1,\)"):
        quantized_kv.quantize(jnp.ones(1), "int8")


def test_a_cache_is_part_of_the_id_and_not_for_training() -> None:
    case = parse_case_id(CASE.format("kvint4-head"))
    assert case.kv_cache == "kvint4-head"
    assert {"kv_int4", "kv_head_scales"} <= set(case.features)
    with pytest.raises(CaseIdError, match="kvfp8-token is a cache: phase must be"):
        parse_case_id("train/f32/B1.T8.S8.N1.K1.H8.V8/full/kvfp8-token/normal/s0")


def test_who_does_not_offer_a_cache_does_not_get_one() -> None:
    reason = implementation_registry.find_implementation("dot_product").supports(
        parse_case_id(CASE.format("kvint8-token"))
    )
    assert reason == "kv_int8: not declared (keys and values stored as int8, with scales)"
    assert (
        implementation_registry.find_implementation("quantized_kv").supports(parse_case_id(CASE.format("kvint8-token")))
        is None
    )


@pytest.mark.parametrize("cache", KV_CACHES)
def test_the_oracle_is_that_of_what_the_cache_means(cache: str) -> None:
    problem = draw_problem(parse_case_id(CASE.format(cache)))
    meant = dataclasses.replace(problem, k=problem.keys, v=problem.values, kv_scales=None)
    np.testing.assert_array_equal(oracle.compute_forward(problem).out, oracle.compute_forward(meant).out)


@pytest.mark.parametrize("cache", KV_CACHES)
def test_what_storing_costs_is_within_its_bound_and_more_than_rounding(cache: str) -> None:
    """Against the keys and values before they were stored: the steps explain the error, rounding alone does not."""
    case = parse_case_id(CASE.format(cache))
    subject = Subject(
        Executor(implementation_registry.find_implementation("quantized_kv")), case, load_default_tolerances()
    )
    before = subject.expectation_before_storing
    assert before is not None
    exact = oracle.compute_forward(subject.problem).out
    assert compare(exact, before.forward["out"]).ratio <= 1
    plain = compute_expectation(draw_problem(dataclasses.replace(case, kv_cache=None)), Arithmetic())
    assert compare(exact, plain.forward["out"]).ratio > 1e3


def test_what_is_no_cache_is_named() -> None:
    q, k = jnp.ones((1, 2, 2, 4)), jnp.ones((1, 6, 2, 4), jnp.int8)
    scales = jnp.ones((1, 6, 2))
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"kv_scales": (scales, scales[:, :4])}, r"kv_scales of v must be .* got \(1, 4, 2\)"),
        ({"kv_scales": (scales, scales[..., :1])}, "kv_scales of v must be"),
        ({"kv_scales": (scales[0], scales)}, "kv_scales of k must be"),
        ({"k": q[:, :1].repeat(6, 1), "kv_scales": (scales, scales)}, "one dtype of int8, int4, float8_e4m3fn"),
    )
    for wrong, message in refused:
        with pytest.raises(ValueError, match=message):
            quantized_kv.attention(**{"q": q, "k": k, "v": k, **wrong})
    with pytest.raises(NotImplementedError, match="kv_scales: only quantised caches"):
        quantized_kv.attention(q, q, q)


def test_a_written_cache_is_read_back() -> None:
    problem = draw_problem(parse_case_id("decode/f32/B1.T1.S30.N2.K1.H8.V8/full/normal/s1"))
    (k, k_scales), (v, v_scales) = (quantized_kv.quantize(jnp.asarray(x), "int8") for x in (problem.k, problem.v))
    out = jax.jit(quantized_kv.attention)(problem.q, k, v, kv_scales=(k_scales, v_scales))
    steps = (quantization.compute_half_steps(np.asarray(x), np.asarray(s)) for x, s in ((k, k_scales), (v, v_scales)))
    stored_to = OperandErrors("f32", np.zeros(problem.q.shape), *steps)
    assert compare(out, compute_expectation(problem, Arithmetic(), inexact=stored_to).forward["out"]).ratio <= 1


def test_int4_is_converted_apart_from_the_products_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA for GPUs computes other values where the conversion is fused with a transpose or a product."""
    stored = jnp.asarray(np.random.default_rng(0).integers(-7, 8, (1, 320, 2, 40)).astype(np.int8))
    monkeypatch.setattr(jax_compat, "runs_on", lambda platform: platform == "gpu")
    widen = jax.make_jaxpr(jax_compat.widen_int4)
    assert "optimization_barrier" in str(widen(stored.astype(jnp.int4)))
    assert "optimization_barrier" not in str(widen(stored))
    widened = jax.jit(lambda x: jax_compat.widen_int4(x).transpose(0, 2, 1, 3))(stored.astype(jnp.int4))
    np.testing.assert_array_equal(widened, stored.transpose(0, 2, 1, 3).astype(jnp.float32))


def list_fused_int4_uses(jaxpr: jax.extend.core.Jaxpr) -> list[str]:
    """List the uses of int4 arrays by other operations than a conversion that a barrier keeps apart."""
    found = []
    apart = {id(x) for eqn in jaxpr.eqns if eqn.primitive.name == "optimization_barrier" for x in eqn.invars}
    for eqn in jaxpr.eqns:
        inner = [each.jaxpr for each in eqn.params.values() if hasattr(each, "jaxpr")]
        for each in inner:
            found += list_fused_int4_uses(each)
        takes_int4 = any(getattr(x.aval, "dtype", None) == jnp.int4 for x in eqn.invars)
        is_apart = eqn.primitive.name == "convert_element_type" and id(eqn.outvars[0]) in apart
        if takes_int4 and not (inner or is_apart):
            found.append(str(eqn))
    return found


def test_a_use_of_int4_that_the_fault_would_reach_is_seen() -> None:
    stored = jnp.ones((1, 4, 2, 8), jnp.int4)
    jaxpr = jax.make_jaxpr(jax.jit(lambda x: x.astype(jnp.float32).transpose(0, 2, 1, 3)))(stored)
    assert list_fused_int4_uses(jaxpr.jaxpr)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in implementation_registry.list_implementations()
        if "kv_int4" in implementation_registry.find_implementation(name).offers
    ],
)
@pytest.mark.parametrize("cache", ["kvint4-token", "kvint4-head"])
def test_no_implementation_of_ours_meets_the_fault_of_int4_on_a_gpu(
    name: str, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no known failure is listed for it: `docs/upstream/jax-gpu-int4-transpose.md`."""
    executor = Executor(implementation_registry.find_implementation(name))
    call, arrays = executor.bind(draw_problem(parse_case_id(CASE.format(cache))))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert list_fused_int4_uses(jax.make_jaxpr(call)(arrays).jaxpr) == []
