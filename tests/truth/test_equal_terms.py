"""Sums of equal terms: bounds allow roundings that all go in one direction, only if terms are equal."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases.case_id import parse_case_id
from cases.operand_values import draw_cotangent, draw_problem
from conformance.truth.equal_terms import compute_equal_term_excess
from conformance.truth.rounding_bounds import Bounded, compute_expectation
from conformance.truth.roundoff import U, compute_walk_steps
from impls.contract.declarations import Arithmetic
from tests.comparison_asserts import LIMIT

EQUAL = "train/f32/B1.T384.S384.N2.K1.H64.V64/causal/levels/s0"
DIFFERENT = "train/f32/B1.T384.S384.N2.K1.H64.V64/causal/normal/s0"


def one_after_the_other(terms: np.ndarray) -> np.ndarray:
    """The sum over the first axis in f32, as the innermost loop of a product computes it."""
    return np.add.accumulate(terms.astype(np.float32), axis=0, dtype=np.float32)[-1].astype(np.float64)


@given(
    weight=st.floats(2.0**-10, 1.0, width=32),
    value=st.floats(2.0**-5, 2.0**5, width=32),
    copies=st.integers(60, 1500),
    others=st.integers(0, 200),
)
def test_equal_terms_one_after_the_other_are_no_further_off_than_is_allowed(
    weight: float, value: float, copies: int, others: int
) -> None:
    few = np.random.default_rng(others).standard_normal(others)
    values = np.concatenate([np.full(copies, value), few]).astype(np.float32)
    terms = np.float32(weight) * values
    allowed = compute_walk_steps(len(terms)) + compute_equal_term_excess(
        np.full((1, 1, len(terms)), weight), values[:, None]
    )
    off = np.abs(one_after_the_other(terms) - terms.astype(np.float64).sum())
    assert off <= LIMIT * U * float(np.max(allowed)) * np.abs(terms.astype(np.float64)).sum()


def test_terms_that_differ_get_nothing() -> None:
    rng = np.random.default_rng(0)
    alike, different = np.full((1, 2, 300), 0.25), rng.standard_normal((1, 2, 300))
    assert compute_equal_term_excess(alike, rng.standard_normal((300, 4))) == 0
    assert np.all(compute_equal_term_excess(different, np.ones((300, 4))) == 0)
    assert np.all(compute_equal_term_excess(np.zeros((1, 2, 300)), np.ones((300, 4))) == 0)
    assert np.all(compute_equal_term_excess(alike, np.ones((300, 4))) > 100)


def dq_of_logsumexp(case_id: str) -> tuple[np.ndarray, Bounded]:
    """dq of a cotangent of logsumexp alone: summed key by key in f32, and what to expect."""
    problem = draw_problem(parse_case_id(case_id))
    cotangent = draw_cotangent(parse_case_id(case_id))
    alone = dataclasses.replace(cotangent, name="lse", out=np.zeros_like(cotangent.out))
    (expected,) = compute_expectation(problem, Arithmetic(), (alone,)).gradients
    assert alone.logsumexp is not None
    q, k = problem.q[0].astype(np.float64), problem.k[0, :, 0].astype(np.float64)
    logits = np.where(problem.allowed[0], np.einsum("tnh,sh->nts", q, k) * problem.effective_scale, -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    dx = weights / weights.sum(axis=-1, keepdims=True) * alone.logsumexp[0][..., None]
    terms = np.einsum("nts,sh->stnh", dx.astype(np.float32), k.astype(np.float32))
    return problem.effective_scale * one_after_the_other(terms)[None], expected["dq"]


@pytest.mark.parametrize("case_id", [EQUAL, DIFFERENT])
def test_dq_summed_key_by_key_is_right(case_id: str) -> None:
    got, expected = dq_of_logsumexp(case_id)
    # Tolerance: what is tested, the bound times the limit of the gate.
    assert np.all(np.abs(got - expected.value) <= LIMIT * expected.bound)


def test_a_thousandth_too_much_is_still_wrong() -> None:
    got, expected = dq_of_logsumexp(EQUAL)
    assert np.any(np.abs(1.001 * got - expected.value) > LIMIT * expected.bound)
