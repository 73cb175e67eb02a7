"""The terms of a bound: every source of rounding has one, they add up, and errors resemble their own."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cases.case_id import parse_case_id
from cases.operand_values import Cotangent, Problem, draw_cotangent, draw_problem
from conformance.truth import bound_sources
from conformance.truth.rounding_bounds import Expectation, compute_expectation
from conformance.truth.roundoff import Roundoff
from impls.contract.declarations import Arithmetic

CASE = "train/{}/B1.T64.S64.N2.K1.H32.V32/causal/normal/s0"


def split(dtype: str, cotangent: bool = False) -> tuple[Problem, Expectation, dict[str, Expectation]]:
    case = parse_case_id(CASE.format(dtype))
    problem, cotangents = draw_problem(case), [Cotangent("random", draw_cotangent(case).out)] if cotangent else []
    whole = compute_expectation(problem, Arithmetic(), cotangents)
    return problem, whole, bound_sources.compute_expectation_by_source(problem, Arithmetic(), cotangents)


def test_every_unit_roundoff_is_a_source() -> None:
    fields = {field.name for field in dataclasses.fields(Roundoff)} - {"block"}  # a length
    assert fields == set(bound_sources.SOURCES)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_what_is_linear_adds_up(dtype: str) -> None:
    _, whole, found = split(dtype)
    name = "logsumexp"
    total = sum(one.forward[name].bound for one in found.values())
    # Tolerance: a dozen float64 sums of terms of one sign, in another order.
    np.testing.assert_allclose(total, whole.forward[name].bound, rtol=1e-12, atol=0)


def test_terms_of_gradients_add_up_but_for_what_is_of_second_order() -> None:
    _, whole, found = split("f32", cotangent=True)
    for name, bounded in whole.gradients[0].items():
        total = sum(one.gradients[0][name].bound for one in found.values())
        # Tolerance: `expm1(x) - x` and products of errors, about x/2 of x with exponents of 1e-4 at most here.
        np.testing.assert_allclose(total, bounded.bound, rtol=1e-4, atol=0)


@pytest.mark.parametrize("source", ["depth", "sums", "out"])
def test_an_error_is_told_by_its_term(source: str) -> None:
    _, _, found = split("f32")
    by_source = bound_sources.select_bounds(found, lambda one: one.forward["out"].bound)
    size = by_source[source]
    error = np.abs(np.random.default_rng(0).normal(size=size.shape)) * size * 1000
    told = bound_sources.find_resemblance(error, by_source, np.ones(size.shape, bool))
    assert told is not None
    assert source in told.sources
    assert told.is_random
    assert 900 < told.times < 1100
    assert bound_sources.find_resemblance(error, by_source, np.ones(size.shape, bool), most=8.0) is None


def test_a_factor_is_no_rounding() -> None:
    _, whole, found = split("f32")
    by_source = bound_sources.select_bounds(found, lambda one: one.forward["out"].bound)
    told = bound_sources.find_resemblance(
        1e-3 * np.abs(whole.forward["out"].value), by_source, np.ones((1, 1, 1, 1), bool)
    )
    assert told is not None
    assert (told.sources[0], told.is_random) == ("out", False)


def test_what_is_like_no_term_is_not_told_by_one() -> None:
    _, whole, found = split("f32")
    by_source = bound_sources.select_bounds(found, lambda one: one.forward["out"].bound)
    shape = whole.forward["out"].value.shape
    noise = np.abs(np.random.default_rng(1).normal(size=shape))
    assert bound_sources.find_resemblance(noise, by_source, np.ones(shape, bool)) is None
    few = np.zeros(shape)
    few[0, 0, 0, :9] = 1.0
    assert bound_sources.find_resemblance(few, by_source, np.ones(shape, bool)) is None
