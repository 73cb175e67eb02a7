"""Lightning indexers: correct ones pass, and each planted bug is red at level `quick`."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from cases.case import Case
from cases.case_id import parse_case_id
from cases.lightning_mask import Lightning
from cases.moba_mask import Chosen
from cases.operand_values import draw_problem
from conformance.check_api.scopes import ImplementationGrids
from reports.records import FAIL, PASS, UNSUPPORTED
from tests.bank import PlantedBug
from tests.checks.test_checks import judge
from tests.planted.features.indexers import BUGS, SORTING, IndexerSteps, indexer


@functools.cache
def list_quick_cases() -> tuple[Case, ...]:
    """List the cases of the grids at `quick`: first those in f32, the smallest of them first."""
    grids = ImplementationGrids(indexer("right"), "quick", 0)
    cases = dict.fromkeys(case for grid in grids.all_grids for case in grid.cases)
    return tuple(sorted(cases, key=lambda case: (case.dtype != "f32", case.q_length * case.kv_length)))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_red(bug: PlantedBug) -> None:
    """It is red in one of the first cases of `quick` that can show it."""
    shown = [case for case in list_quick_cases() if bug.trigger(case) and case.kv_length > 9]
    implementation = bug.build()
    assert any(one.verdict == FAIL for case in shown[:12] for one in judge(implementation, case.id, "forward"))


@pytest.mark.parametrize("steps", [IndexerSteps(), SORTING], ids=["top_k", "sort"])
@pytest.mark.parametrize("check", ["forward", "poison", "independence", "arguments", "transforms"])
def test_a_correct_indexer_passes(steps: IndexerSteps, check: str) -> None:
    cases = list_quick_cases()
    chosen = (cases[0], next(case for case in cases if case.mask.endswith("causal") and case.distribution == "ties"))
    judged = [one for case in chosen for one in judge(indexer("right", steps), case.id, check)]
    assert {one.verdict for one in judged} <= {PASS, UNSUPPORTED}


def test_a_list_that_names_a_key_twice_is_red() -> None:
    double = IndexerSteps(choose=lambda scores, top_k: SORTING.choose(scores, top_k)[..., :1].repeat(top_k, axis=-1))
    case = next(case for case in list_quick_cases() if "lightning-8" in case.mask)
    assert FAIL in {one.verdict for one in judge(indexer("double", double), case.id, "forward")}


@pytest.mark.parametrize("distribution", ["normal", "ties", "large", "heavy"])
@pytest.mark.parametrize("spec", ["lightning-8", "lightning-8-causal"])
def test_the_chosen_keys_are_those_of_the_formula(spec: str, distribution: str) -> None:
    problem = draw_problem(parse_case_id(f"prefill/f32/B2.T40.S40.N4.K1.H17.V8/{spec}/{distribution}/s0"))
    assert isinstance(problem.mask, Lightning)
    mask = problem.resolved_mask
    assert isinstance(mask, Chosen)
    assert mask.decided.mean() > 0.9
    q, k = problem.q.astype(np.float64), problem.k.astype(np.float64)
    for b in range(2):
        for t in range(40):
            scores = sum(q[b, t, n, 0] * np.maximum(k[b, :, 0, 1:] @ q[b, t, n, 1:], 0) for n in range(4))
            candidates = range(t + 1 if problem.mask.causal else 40)
            best = sorted(candidates, key=lambda s: (-np.asarray(scores)[s], s))[:8]
            if mask.decided[b, 0, t] and distribution != "ties":
                assert set(np.flatnonzero(mask.array[b, 0, t])) == set(best)
            assert mask.array[b, 0, t].sum() == len(best)
