"""Scores that an indexer returns: correct ones pass, and each planted bug is red at level `quick`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.case import Case
from cases.case_id import parse_case_id
from cases.lightning_mask import split_indexer_operands
from cases.operand_values import draw_problem
from conformance.check_api.scopes import INDEXED, ImplementationGrids
from conformance.execution.plain_functions import build_implementation
from conformance.truth.index_score_oracle import compute_index_scores
from impls.contract.implementation import Implementation
from reports.records import ERROR, FAIL, PASS, UNSUPPORTED
from tests.bank import PlantedBug
from tests.checks.test_checks import judge
from tests.planted.features import indexers
from tests.planted.features.index_scores import BUGS
from tests.planted.planting.scored_indexer import pulled_scores, sorted_scores


@functools.cache
def list_cases() -> tuple[Case, ...]:
    return INDEXED.cases(ImplementationGrids(sorted_scores("right"), "quick", 0))


def list_red(implementation: Implementation, case: Case) -> set[str]:
    return {one.observable for one in judge(implementation, case.id, "index_scores") if one.verdict == FAIL}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_red(bug: PlantedBug) -> None:
    """It is red in one of the cases of `quick`, and in no result that it leaves as it is."""
    implementation = bug.build()
    red = {name for case in list_cases() for name in list_red(implementation, case)}
    assert red
    assert red <= set(bug.shows)


@pytest.mark.parametrize("build", [sorted_scores, pulled_scores], ids=["sorted", "pulled"])
def test_a_correct_indexer_passes(build: Any) -> None:
    ids = ("f32/B2.T24.S24.N4.K1.H33.V16/lightning-8-causal/ties", "f16/B1.T24.S40.N4.K1.H65.V16/lightning-8/levels")
    cases = (*list_cases(), *(parse_case_id(f"prefill/{each}/s0") for each in ids))
    judged = [one for case in cases for one in judge(build("right"), case.id, "index_scores")]
    assert {one.verdict for one in judged} == {PASS}
    assert {one.observable for one in judged} == {"scores", "dq", "dk", "dweights"}


def test_an_indexer_without_scores_is_unsupported() -> None:
    assert {one.verdict for one in judge(indexers.indexer("plain"), list_cases()[0].id, "index_scores")} == {
        UNSUPPORTED
    }


def test_scores_of_another_dtype_are_an_error() -> None:
    def indexer(q: Any, k: Any, weights: Any, *, top_k: int, causal: bool = False, return_scores: bool = False) -> Any:
        places = jnp.full((*q.shape[:2], top_k), -1, jnp.int32)
        return (places, places) if return_scores else places

    judged = judge(build_implementation(indexer, "wrong"), list_cases()[0].id, "index_scores")
    assert {one.verdict for one in judged} <= {ERROR, FAIL}


def test_the_oracle_agrees_with_derivatives_in_float64() -> None:
    case = parse_case_id("prefill/f32/B2.T9.S12.N3.K1.H17.V8/lightning-5/normal/s0")
    problem = draw_problem(case)
    weights, q, k = split_indexer_operands(problem.q, problem.k)
    indices = np.random.default_rng(0).integers(-1, 12, (2, 9, 5))
    cotangent = np.random.default_rng(1).standard_normal((2, 9, 5))

    def score(q: Any, k: Any, w: Any) -> Any:
        keys = k[np.arange(2)[:, None, None], np.maximum(indices, 0)]
        return jnp.einsum("btn,btne->bte", w, jax.nn.relu(jnp.einsum("btnd,bted->btne", q, keys)))

    with jax.enable_x64(True):
        scores, pull = jax.vjp(score, *(jnp.asarray(x, jnp.float64) for x in (q, k, weights)))
        dq, dk, dw = pull(jnp.where(indices < 0, 0, cotangent))
    found = compute_index_scores(q, k, weights, indices, cotangent, "f32")
    # Sums in float64 of at most 51 products below 27: 51 * 27 * 2**-53 is 1.5e-13.
    np.testing.assert_allclose(found["scores"].value, np.where(indices < 0, 0, scores), rtol=0, atol=1e-12)
    for name, exact in (("dq", dq), ("dk", dk), ("dweights", dw)):
        np.testing.assert_allclose(found[name].value, exact, rtol=0, atol=1e-12)
