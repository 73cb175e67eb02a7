"""Scores and masks as functions: what they give pair by pair, on any array, and without an array of their own."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from cases import mask_spec, score_functions
from cases.case import Case, CaseIdError
from cases.case_id import parse_case_id
from cases.mask_spec import KINDS
from cases.masks import Causal, Dense, Lengths, MaskFunction, Window, has_formula
from cases.operand_values import draw_problem
from cases.score_functions import LEVELS, FormulaScore, Score, ThenCapped

B, N, T, S = 3, 4, 12, 20
_SIZES = (B, N, T, S)
Places = tuple[int, int, int, int]
FORMULAS = (
    "full",
    "causal-o8",
    "window-l3-r2-o8",
    "chunked-7-o8",
    "causal_or_spans-1-4-6-11",
    "balanced-2",
    "lengths-0-7-20",
    "own-l4-0-7-20",
    "chunked-4_or_window-l1-r2_at-0-7-20",
    "causal_and_lengths-3-9-20",
    "window-l3-r0_or_lengths-0-2-1",
)


def each() -> Iterator[Places]:
    return itertools.product(range(B), range(N), range(T), range(S))


def score_of(level: str, spread: float = 1.0) -> FormulaScore:
    score = score_functions.build_score(level, num_q_heads=N, q_length=T, kv_length=S, spread=spread)
    assert isinstance(score, FormulaScore)
    return score


def _compute_dense(score: FormulaScore, batch: int, heads: int, q_length: int, kv_length: int) -> np.ndarray:
    return score.dense(batch, heads, np.arange(q_length)[None], kv_length)


def meant(score: Score, x: float, b: int, n: int, i: int, j: int) -> float:
    """The formulas of docs/contract.md, section 2, once more."""
    behind = i + S - T - j
    match score:
        case score_functions.Relative(step=step, reach=reach):
            return x + step * max(-reach, min(behind, reach))
        case score_functions.Alibi(step=step):
            return x - step * (n + 1) * abs(behind)
        case score_functions.Rows(step=step):
            return x + step * ((behind + 3 * n + 5 * b) % 8)
        case score_functions.Cap(step=step):
            cap = step * (64 + max(-32, min(behind, 64)))
            return cap * math.tanh(x / cap)
    raise AssertionError(score)


@pytest.mark.parametrize("level", LEVELS)
def test_a_score_is_its_formula_for_every_row_head_query_and_key(level: str) -> None:
    score, x = score_of(level), np.full(_SIZES, 0.75)
    found = score(x, *np.ogrid[:B, :N, :T, :S])
    expected = np.reshape([meant(score, 0.75, *at) for at in each()], _SIZES)
    # Tolerance: the tanh of two libraries in float64, a few units in the last place.
    np.testing.assert_allclose(found, expected, rtol=2.0**-50, atol=0)
    dense = _compute_dense(score, *_SIZES)
    assert (found == (dense * np.tanh(x / dense) if score.caps else x + dense)).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0, 18.0])
def test_what_a_score_adds_is_a_number_of_f32_and_of_the_size_of_the_logits(level: str, spread: float) -> None:
    for q_length, kv_length in ((128, 128), (1, 1500), (384, 100)):
        sizes = {"q_length": q_length, "kv_length": kv_length}
        score = score_functions.build_score(level, num_q_heads=6, **sizes, spread=spread)
        assert isinstance(score, FormulaScore)
        dense = _compute_dense(score, 3, 6, q_length, kv_length)
        assert (dense.astype(np.float32) == dense).all()
        assert 0.5 <= np.abs(dense).max() / max(1.0, spread / 2) <= 8
        assert np.ptp(dense) > 0.5


@pytest.mark.parametrize("level", LEVELS)
def test_rows_heads_and_distances_are_told_apart(level: str) -> None:
    dense = _compute_dense(score_of(level), *_SIZES)
    assert (dense != dense[..., :1]).any()
    by_row, by_head = ((dense != dense.take([0], axis)).any() for axis in (0, 1))
    assert by_row == (level == "score-rows")
    assert by_head == (level in ("score-rows", "score-alibi"))


@pytest.mark.parametrize("spec", FORMULAS)
def test_a_mask_as_a_function_is_the_mask(spec: str) -> None:
    mask = mask_spec.build_mask(spec, B, N, T, S, 0)
    function = MaskFunction(mask)
    dense = np.broadcast_to(mask.dense(T, S), _SIZES)
    assert (np.broadcast_to(function(*np.ogrid[:B, :N, :T, :S]), _SIZES) == dense).all()
    assert all(bool(function(*at)) == dense[at] for at in each())  # Python's numbers


def test_masks_are_functions_unless_they_are_arrays_or_choices() -> None:
    found = {
        kind.name
        for kind in KINDS
        if kind.example and not has_formula(mask_spec.build_mask(kind.example, 1, 2, 128, 128, 0))
    }
    assert found == {"dense", "densehead", "densebatch", "indexer", "lightning", "listed", "moba"}
    array = Dense(np.ones((T, S), bool))
    for mask in (array, Causal() & array, array | Lengths((1, 2, 3))):
        with pytest.raises(ValueError, match="must be a formula of places"):
            MaskFunction(mask)


def functions() -> list[Any]:
    masks = [MaskFunction(mask_spec.build_mask(spec, B, N, T, S, 0)) for spec in FORMULAS]
    given = [score_of(level) for level in LEVELS]
    return [*masks, *given, ThenCapped(None, 2.0), ThenCapped(given[0], 2.0)]


@pytest.mark.parametrize("function", functions(), ids=repr)
def test_a_function_captures_no_array_and_stays_in_32_bits(function: Any) -> None:
    takes_score = not isinstance(function, MaskFunction)

    def call(x: Any, b: Any, n: Any, i: Any) -> Any:
        j = jax.lax.broadcasted_iota(jnp.int32, (8, 16), 1)
        return function(x, b, n, i + j * 0, j) if takes_score else function(b, n, i + j * 0, j)

    x, one = jax.ShapeDtypeStruct((8, 16), np.float32), jax.ShapeDtypeStruct((), np.int32)
    for doubles in (False, True):
        with jax.enable_x64(doubles):
            traced = jax.make_jaxpr(call)(x, one, one, one)
        assert traced.consts == []
        assert [str(out.dtype) for out in traced.out_avals] == ["float32" if takes_score else "bool"]
    assert hash(function) == hash(dataclasses.replace(function))


def test_a_kernel_of_pallas_can_call_them() -> None:
    score, mask = ThenCapped(score_of("score-rows"), 2.0), MaskFunction(Window(3, 2, S - T) & Lengths((0, 7, 20)))

    def kernel(x: Any, out: Any) -> None:
        b, n = pl.program_id(0), pl.program_id(1)
        i, j = (jax.lax.broadcasted_iota(jnp.int32, (T, S), axis) for axis in (0, 1))
        out[0, 0] = jnp.where(mask(b, n, i, j), score(x[0, 0], b, n, i, j), -jnp.inf)

    x = np.full(_SIZES, 0.75, np.float32)
    block = pl.BlockSpec((1, 1, T, S), lambda b, n: (b, n, 0, 0))
    call = pl.pallas_call(
        kernel, jax.ShapeDtypeStruct(_SIZES, np.float32), grid=(B, N), in_specs=[block], out_specs=block, interpret=True
    )
    found = np.asarray(call(x))
    places = np.ogrid[:B, :N, :T, :S]
    expected = np.where(mask(*places), score(x.astype(np.float64), *places), -np.inf)
    assert (np.isfinite(found) == np.isfinite(expected)).all()
    # Tolerance: a tanh in f32, a few units in the last place of 2.
    np.testing.assert_allclose(found, expected, rtol=0, atol=16 * 2.0**-24)


def test_a_case_says_its_score_and_draws_it_alike_for_every_seed() -> None:
    case = parse_case_id("train/f32/B2.T12.S20.N4.K2.H8.V8/causal/score-rows/normal/s0")
    assert case.score == "score-rows"
    assert parse_case_id(case.id) == case
    assert "score_mod" in case.features
    assert (
        draw_problem(case).score_mod
        == draw_problem(dataclasses.replace(case, seed=5)).score_mod
        == score_of("score-rows")
    )
    with pytest.raises(CaseIdError, match="score-cap is a soft cap: the case has another, 2"):
        Case(score="score-cap", soft_cap=2.0)
    with pytest.raises(CaseIdError, match=r"'score-other' in .* is none of .*score-relative"):
        parse_case_id("train/f32/B2.T12.S20.N4.K2.H8.V8/causal/score-other/normal/s0")


def test_a_score_follows_the_lengths_of_its_problem() -> None:
    problem = draw_problem(parse_case_id("train/f32/B2.T12.S20.N4.K2.H8.V8/full/score-relative/normal/s0"))
    shorter = dataclasses.replace(problem, k=problem.k[:, :15], v=problem.v[:, :15])
    [(_, term)], [(_, shorter_term)] = problem.logit_terms, shorter.logit_terms
    # In both it is the key that is three before the last query's.
    assert (shorter_term[..., -1, -4] == term[..., -1, -4]).all()
    capped = dataclasses.replace(problem, score_mod=score_of("score-cap"))
    with pytest.raises(ValueError, match="soft_cap and score_mod"):
        _ = dataclasses.replace(capped, soft_cap=2.0).soft_caps
