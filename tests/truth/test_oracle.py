"""Compare the oracle with autodiff, finite differences and loops in 50 digits, and check identities."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.case_id import parse_case_id
from cases.masks import Dense, Full
from cases.operand_values import Cotangent, Problem, draw_cotangent, draw_problem
from cases.score_functions import Alibi, Cap, Relative, Rows, Score
from conformance.truth import oracle
from conformance.truth.rounding_bounds import Bounded
from tests.comparison_asserts import (
    LIMIT,
    TOLERANCES,
    assert_right,
    compute_expected,
    compute_float64_bounds,
    list_failures,
)

# T, S, H and V all differ, heads are grouped, some rows are empty and some keys dead.
CASES = (
    "train/f32/B1.T9.S9.N2.K2.H4.V4/full/normal/s1",
    "train/f32/B2.T12.S15.N4.K2.H6.V5/causal-o3/sinks/normal/s2",
    "train/f32/B2.T12.S15.N4.K2.H6.V5/densehead-d40/softcap2/alibi/large/s3",
    "train/f32/B2.T12.S15.N4.K1.H6.V3/densebatch-d40/segpad/softcap2/sinks/bias/scale0.3/knee/s4",
    "train/f32/B2.T12.S15.N6.K2.H3.V5/dense-d40/sinks/biashead/heavy/s5",
    "train/f32/B2.T12.S15.N4.K2.H3.V5/lengths-0-9/biaskey/alibi/cancel/s6",
    "train/f32/B2.T1.S15.N4.K2.H3.V5/window-l4-r0-o9/seg/sinks/dominant/s7",
    "train/f32/B1.T8.S8.N2.K1.H4.V4/causal/huge/s8",
    "train/f32/B2.T12.S15.N4.K2.H6.V5/causal-o3/softcap2/sinks/biashead/score-relative/normal/s9",
    "train/f32/B2.T12.S15.N4.K1.H6.V3/lengths-0-9/alibi/score-alibi/large/s1",
    "train/f32/B3.T15.S12.N4.K2.H3.V5/densehead-d40/score-rows/normal/s2",
    "train/f32/B2.T12.S15.N4.K2.H3.V5/causal-o3/sinks/bias/score-cap/large/s3",
    "train/f32/B2.T12.S15.N4.K2.H3.V5/dense-d40/softcap2/sinks/biashead/scale0.7/alibi/logitscale/normal/s4",
)
TINY = (
    "train/f32/B1.T3.S4.N2.K1.H2.V3/causal-o1/softcap2/sinks/bias/scale0.7/alibi/normal/s1",
    "train/f32/B2.T2.S3.N2.K2.H2.V1/lengths-0-2/seg/sinks/biaskey/large/s2",
    "train/f32/B1.T3.S3.N2.K1.H2.V2/dense-d60/biashead/normal/s3",
    "train/f32/B2.T3.S4.N2.K1.H2.V1/causal-o1/score-rows/softcap2/normal/s4",
    "train/f32/B1.T3.S4.N2.K1.H2.V2/full/sinks/score-cap/large/s5",
    "train/f32/B1.T2.S3.N4.K2.H2.V1/causal-o1/softcap2/bias/scale0.7/logitscale/normal/s5",
)
NAMES = {"dq": "q", "dk": "k", "dv": "v", "dsinks": "sinks", "dbias": "bias", "dlogit_scale": "logit_scale"}
Gradients = dict[str, np.ndarray]


def in_float64(problem: Problem) -> Problem:
    changed = {x: getattr(problem, x) for x in NAMES.values()}
    return dataclasses.replace(problem, **{x: v.astype(np.float64) for x, v in changed.items() if v is not None})


def problem_of(case_id: str) -> Problem:
    return in_float64(draw_problem(parse_case_id(case_id)))


def cotangents(case_id: str) -> tuple[np.ndarray, np.ndarray]:
    """Of out and logsumexp, in float64; rows with nothing to see have no cotangent of their infinite logsumexp."""
    drawn, problem = draw_cotangent(parse_case_id(case_id)), problem_of(case_id)
    assert drawn.logsumexp is not None
    lse = drawn.logsumexp.astype(np.float64)
    if problem.sinks is None:
        lse = np.where(problem.empty_rows, 0.0, lse)
    return drawn.out.astype(np.float64), lse


def rounding(case_id: str, do: np.ndarray, dlse: np.ndarray | None = None, computations: int = 1) -> dict[str, Bounded]:
    """What the oracle says, and how far from the truth rounding in float64 may take it."""
    return compute_float64_bounds(
        compute_expected(draw_problem(parse_case_id(case_id)), Cotangent("random", do, dlse)), computations
    )


def around(values: Gradients, rounded: dict[str, Bounded]) -> dict[str, Bounded]:
    """Other values with the same bounds."""
    return {name: Bounded(value, rounded[name].bound) for name, value in values.items()}


def number_of(score: Score, b: Any, n: Any, behind: Any) -> Any:
    """What a score adds, or the soft cap that it is, where the key is so far behind the query, counted from the end."""
    match score:
        case Relative(step=step, reach=reach):
            return step * np.clip(behind, -reach, reach)
        case Alibi(step=step):
            return -step * (n + 1) * np.abs(behind)
        case Rows(step=step):
            return step * ((behind + 3 * n + 5 * b) % 8)
        case Cap(step=step):
            return step * (64 + np.clip(behind, -32, 64))
    raise AssertionError(score)


def literal_forward(problem: Problem, operands: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """`out` and `logsumexp` by the contract, one head at a time; empty rows give 0 and, without sink, 0."""
    q, k, v = operands["q"], operands["k"], operands["v"]
    batch, q_length, heads, depth = q.shape
    full = (batch, heads, q_length, k.shape[1])
    scale = problem.scale or depth**-0.5
    allowed = np.broadcast_to(problem.allowed, full)
    bias = jnp.broadcast_to(operands.get("bias", jnp.zeros((1, 1, 1, 1))), full)
    before_the_last = (np.arange(q_length)[::-1, None], np.arange(k.shape[1])[::-1])  # both end at the same place
    distance = abs(before_the_last[0] - before_the_last[1])
    slopes = np.zeros(heads) if problem.alibi_slopes is None else problem.alibi_slopes.astype(np.float64)
    outs, lses = [], []
    for n in range(heads):
        kv = n // (heads // k.shape[2])
        x = scale * jnp.einsum("bth,bsh->bts", q[:, :, n], k[:, :, kv])
        if "logit_scale" in operands:
            x = operands["logit_scale"][n] * x
        x = x + bias[:, n] - slopes[n] * distance
        if problem.score_mod is not None:
            behind = before_the_last[1] - before_the_last[0]
            number = number_of(problem.score_mod, np.arange(batch)[:, None, None], n, behind)
            x = number * jnp.tanh(x / number) if problem.score_mod.caps else x + number
        z = x if problem.soft_cap is None else problem.soft_cap * jnp.tanh(x / problem.soft_cap)
        columns = jnp.where(allowed[:, n], z, -1e300)
        if "sinks" in operands:
            sink = jnp.broadcast_to(operands["sinks"][n], (*z.shape[:2], 1))
            columns = jnp.concatenate([columns, sink], axis=-1)
        lse = jax.scipy.special.logsumexp(columns, axis=-1)
        p = jnp.where(allowed[:, n], jnp.exp(jnp.where(allowed[:, n], z - lse[..., None], 0)), 0)
        empty = ~np.any(allowed[:, n], axis=-1, keepdims=False)
        outs.append(jnp.where(empty[..., None], 0, jnp.einsum("bts,bsv->btv", p, v[:, :, kv])))
        lses.append(lse if "sinks" in operands else jnp.where(empty, 0, lse))
    return jnp.stack(outs, axis=2), jnp.stack(lses, axis=1)


def by_autodiff(problem: Problem, do: np.ndarray, dlse: np.ndarray) -> tuple[np.ndarray, np.ndarray, Gradients]:
    with jax.enable_x64(True):
        found = {x: getattr(problem, x) for x in NAMES.values()}
        operands = {x: jnp.asarray(v) for x, v in found.items() if v is not None}

        def both(operands: dict[str, Any]) -> Any:
            primal, pullback = jax.vjp(lambda operands: literal_forward(problem, operands), operands)
            return *primal, pullback((jnp.asarray(do), jnp.asarray(dlse)))[0]

        out, lse, gradients = jax.jit(both)(operands)
        return np.asarray(out), np.asarray(lse), {f"d{x}": np.asarray(g) for x, g in gradients.items()}


@pytest.mark.parametrize("case_id", CASES)
def test_forward_and_backward_agree_with_autodiff_of_an_independent_forward(case_id: str) -> None:
    problem, (do, dlse) = problem_of(case_id), cotangents(case_id)
    out, lse, gradients = by_autodiff(problem, do, dlse)
    forward = oracle.compute_forward(problem)
    seen = np.isfinite(forward.logsumexp)
    assert (seen == ~problem.empty_rows).all() or problem.sinks is not None
    bounds = rounding(case_id, do, dlse, computations=2)
    found = oracle.compute_backward(problem, do, dlse)
    assert set(found) == set(gradients)
    assert_right({"out": forward.out, **found}, around({"out": out, **gradients}, bounds))
    assert_right({"logsumexp": forward.logsumexp}, around({"logsumexp": lse}, bounds), judged=seen)


@pytest.mark.parametrize("case_id", CASES)
def test_vanilla_and_flash_backward_agree_to_rounding(case_id: str) -> None:
    problem, (do, dlse) = draw_problem(parse_case_id(case_id)), cotangents(case_id)
    expected = rounding(case_id, do, dlse)
    saved = oracle.compute_forward(problem)
    assert_right(oracle.compute_backward(problem, do, dlse), expected)
    assert_right(oracle.compute_backward(problem, do, dlse, form="flash"), expected)
    assert_right(oracle.compute_backward(problem, do, dlse, form="flash", saved=saved), expected)
    rounded = dataclasses.replace(saved, out=saved.out.astype(np.float32))
    assert list_failures(oracle.compute_backward(problem, do, dlse, form="flash", saved=rounded), expected)


@pytest.mark.parametrize("case_id", [case_id for case_id in CASES if "huge" not in case_id])
def test_vanilla_and_flash_backward_may_differ_by_less_than_1e_12(case_id: str) -> None:
    """By how much each may be off at most, so that it is true of any machine; that they stay within, see above."""
    for name, x in rounding(case_id, *cotangents(case_id), computations=2).items():
        if name in NAMES:
            assert LIMIT * x.bound.max() < 1e-12 * (1 + np.abs(x.value).max()), name


def test_flash_backward_shows_the_rounding_of_the_saved_output() -> None:
    problem, (do, dlse) = problem_of(CASES[1]), cotangents(CASES[1])
    exact = oracle.compute_forward(problem)
    rounded = oracle.Forward(exact.out.astype(np.float16), exact.logsumexp, exact.max_logits)
    expected = rounding(CASES[1], do, dlse)
    flash = oracle.compute_backward(problem, do, dlse, form="flash", saved=rounded)
    assert_right({"dv": flash["dv"]}, expected)
    assert "dq" in list_failures({"dq": flash["dq"]}, expected)
    limit = TOLERANCES.limit("f32", "dq").rms  # a few rows, each with one error in D
    # What rounding `out` moves D by, `|do|` times half a spacing of f16, moves dq by that times `scale p |k|`.
    bound = expected["dq"].bound.copy()
    for group in oracle.iter_head_groups(problem):
        moved = (2.0**-11 * np.abs(group.out) + 2.0**-25) * np.abs(do[group.batch, :, group.heads]).transpose(1, 0, 2)
        by_key = group.scale * group.p * moved.sum(axis=-1, keepdims=True)
        bound[group.batch, :, group.heads] += (by_key @ np.abs(group.k)).transpose(1, 0, 2) / limit
    assert_right({"dq": flash["dq"]}, {"dq": Bounded(expected["dq"].value, bound)})


def loss(problem: Problem, do: np.ndarray, dlse: np.ndarray) -> float:
    forward = oracle.compute_forward(problem)
    return float((forward.out * do).sum() + (forward.logsumexp[dlse != 0] * dlse[dlse != 0]).sum())


def moved(problem: Problem, operand: str, index: tuple[int, ...], step: float) -> Problem:
    array = getattr(problem, operand).copy()
    array[index] += step
    return dataclasses.replace(problem, **{operand: array})


def elements(problem: Problem) -> Iterator[tuple[str, tuple[int, ...]]]:
    """`(gradient, index)` of every element of every operand that the problem has."""
    for name, operand in NAMES.items():
        array = getattr(problem, operand)
        if array is not None:
            yield from ((name, index) for index in np.ndindex(array.shape))


@pytest.mark.parametrize("case_id", TINY)
def test_backward_agrees_with_central_differences_in_every_element(case_id: str) -> None:
    problem, (do, dlse) = problem_of(case_id), cotangents(case_id)
    gradients, expected = oracle.compute_backward(problem, do, dlse), rounding(case_id, do, dlse)
    step = 2.0**-15
    terms = {"out": do, "logsumexp": dlse}
    finite = {name: np.where(x != 0, expected[name].value, 0.0) for name, x in terms.items()}
    added = sum((np.abs(finite[name] * x)).sum() for name, x in terms.items())
    # Of a loss: what is added up, and adding up that many numbers.
    of_loss = sum(LIMIT * (expected[name].bound * np.abs(x)).sum() for name, x in terms.items())
    of_loss += sum(x.size for x in terms.values()) * 2.0**-53 * added

    def difference(operand: str, index: tuple[int, ...], step: float) -> float:
        above, below = (loss(moved(problem, operand, index, s), do, dlse) for s in (step, -step))
        return (above - below) / (2 * step)

    for name, index in elements(problem):
        near, far = (difference(NAMES[name], index, s) for s in (step, 2 * step))
        # Tolerance: truncation, which is a third of what it grows by from one step to two; rounding of two losses over
        # two steps; that of the gradient itself.
        tolerance = abs(far - near) + of_loss / step + LIMIT * expected[name].bound[index]
        assert tolerance < 1e-8
        assert abs(gradients[name][index] - near) <= tolerance, (name, index)  # Tolerance: as just derived


@pytest.mark.parametrize("case_id", [x for x in CASES if "N4.K4" in x or "N2.K2" in x] + [CASES[1], CASES[6]])
def test_dv_sums_to_the_cotangent_that_the_sinks_leave(case_id: str) -> None:
    problem, (do, _) = problem_of(case_id), cotangents(case_id)
    kv_heads = problem.k.shape[2]
    expected = rounding(case_id, do, computations=2)
    kept, bound = np.zeros_like(do), np.zeros_like(do)
    for group in oracle.iter_head_groups(problem):
        share = (1 - group.p_sink) * group.allowed.any(axis=-1)
        kept[group.batch, :, group.heads] = share.T[..., None] * do[group.batch, :, group.heads]
        # What is left of 1 has the error of the sink's probability, `exp(sink - logsumexp)`, and two roundings more.
        sinks = 0.0 if group.sinks is None else group.p_sink * np.abs(group.sinks[:, None] - group.logsumexp)
        lost = expected["logsumexp"].bound[group.batch, group.heads] * group.p_sink + 2.0**-53 * (sinks + 2)
        bound[group.batch, :, group.heads] = lost.T[..., None] * np.abs(do[group.batch, :, group.heads])
    by_group, of_group = (
        x.sum(axis=1).reshape(do.shape[0], kv_heads, -1, do.shape[-1]).sum(axis=2) for x in (kept, bound)
    )
    summed = Bounded(by_group, expected["dv"].bound.sum(axis=1) + of_group)
    assert_right({"dv": oracle.compute_backward(problem, do)["dv"].sum(axis=1)}, {"dv": summed})


@pytest.mark.parametrize("case_id", CASES)
def test_backward_is_linear_in_the_cotangents(case_id: str) -> None:
    problem, (do, dlse) = problem_of(case_id), cotangents(case_id)
    other = np.random.default_rng(0).normal(size=do.shape)
    one, two = oracle.compute_backward(problem, do, dlse), oracle.compute_backward(problem, other)
    both = oracle.compute_backward(problem, 2 * do - 3 * other, 2 * dlse)
    of_one, of_two = rounding(case_id, do, dlse), rounding(case_id, other)
    of_both = rounding(case_id, 2 * do - 3 * other, 2 * dlse)
    # Rounding the cotangent of both, in float64 too, is at most as much again as its products are rounded by.
    summed = {
        name: Bounded(2 * x - 3 * two[name], 2 * of_one[name].bound + 3 * of_two[name].bound + 2 * of_both[name].bound)
        for name, x in one.items()
    }
    assert_right(both, summed)
    assert not any(g.any() for g in oracle.compute_backward(problem, np.zeros_like(do)).values())


def test_adding_a_constant_to_all_logits_moves_logsumexp_alone() -> None:
    case_id = "train/f32/B2.T12.S15.N4.K2.H6.V5/densehead-d40/bias/normal/s9"
    drawn, (do, _) = draw_problem(parse_case_id(case_id)), cotangents(case_id)
    assert drawn.bias is not None
    # A bias of few bits, to which 3.5 can be added exactly.
    bias = np.round(drawn.bias * np.float32(1024)) / np.float32(1024)
    moved = bias + np.float32(3.5)
    np.testing.assert_array_equal(moved.astype(np.float64), bias.astype(np.float64) + 3.5)
    problem, shifted = (dataclasses.replace(drawn, bias=x) for x in (bias, moved))
    before, after = (compute_float64_bounds(compute_expected(x, Cotangent("out", do))) for x in (problem, shifted))
    both = {name: Bounded(x.value, x.bound + after[name].bound) for name, x in before.items()}
    for name in ("logsumexp", "max_logits"):
        both[name] = Bounded(both[name].value + 3.5, both[name].bound)
    assert_right({**dataclasses.asdict(oracle.compute_forward(shifted)), **oracle.compute_backward(shifted, do)}, both)
    dbias = before["dbias"]
    no_sum = Bounded(np.zeros(dbias.value.shape[:-1]), dbias.bound.sum(axis=-1))
    assert_right({"dbias": oracle.compute_backward(problem, do)["dbias"].sum(axis=-1)}, {"dbias": no_sum})


def test_scale_bias_cap_and_mask_apply_in_the_contracts_order() -> None:
    def one(x: list[float]) -> np.ndarray:
        return np.array(x, np.float32).reshape(1, -1, 1, 1)

    problem = Problem(
        q=one([2.0]),
        k=one([3.0, 50.0]),
        v=one([1.0, 9.0]),
        mask=Dense(np.array([[True, False]])),
        soft_cap=4.0,
        bias=np.full((1, 1, 1, 1), 1.0, np.float32),
        scale=0.5,
    )
    forward = oracle.compute_forward(problem)
    by_hand = {"max_logits": np.full((1, 1, 1), 4 * math.tanh((0.5 * 2 * 3 + 1) / 4))}
    assert_right(
        {"max_logits": forward.max_logits}, around(by_hand, compute_float64_bounds(compute_expected(problem), 2))
    )
    assert forward.out.item() == 1.0  # one key: the exponential of zero


def test_query_heads_read_contiguous_groups() -> None:
    problem = problem_of("train/f32/B1.T5.S7.N6.K2.H4.V3/full/normal/s0")
    changed = problem.v.copy()
    changed[:, :, 1] += 1
    moved_heads = (
        oracle.compute_forward(dataclasses.replace(problem, v=changed)).out != oracle.compute_forward(problem).out
    )
    np.testing.assert_array_equal(moved_heads.any(axis=(0, 1, 3)), [False, False, False, True, True, True])


@pytest.mark.parametrize("sinks", [False, True])
def test_empty_rows_give_zero_or_the_mean_and_touch_no_gradient_but_the_means_dv(sinks: bool) -> None:
    problem = draw_problem(parse_case_id("train/f32/B1.T3.S4.N2.K2.H2.V2/full/sinks/normal/s0"))
    hidden = np.ones((3, 4), bool)
    hidden[1] = False
    problem = dataclasses.replace(problem, mask=Dense(hidden), sinks=problem.sinks if sinks else None)
    do = np.zeros((1, 3, 2, 2))
    do[:, 1] = 1.0
    zero, mean = (oracle.compute_forward(problem, e) for e in ("zero", "mean"))
    assert (zero.out[:, 1] == 0).all()
    assert (zero.max_logits[:, :, 1] == -np.inf).all()
    expected = np.full((1, 2), -np.inf) if problem.sinks is None else problem.sinks[None]
    np.testing.assert_array_equal(zero.logsumexp[:, :, 1], expected)
    np.testing.assert_array_equal(mean.logsumexp, zero.logsumexp)
    average = np.zeros((1, 2, 2)) if sinks else problem.v.astype(np.float64).mean(axis=1)
    bound = compute_float64_bounds(compute_expected(problem, empty_rows="mean"), 2)["out"].bound[:, 1]
    assert_right({"out": mean.out[:, 1]}, {"out": Bounded(average, bound)})
    forms: tuple[oracle.Backward, ...] = ("vanilla", "flash")
    fillings: tuple[Literal["zero", "mean"], ...] = ("zero", "mean")
    for form, empty_rows in itertools.product(forms, fillings):
        gradients = oracle.compute_backward(problem, do, form=form, empty_rows=empty_rows)
        dv = gradients.pop("dv")
        assert (dv == (0.25 if empty_rows == "mean" and not sinks else 0)).all()
        assert not any(g.any() for g in gradients.values())


@pytest.mark.parametrize("empty_rows", ["zero", "mean"])
def test_sinks_of_minus_infinity_are_no_sinks(empty_rows: Literal["zero", "mean"]) -> None:
    """Also in rows without a visible key, which are all rows of the first sequence."""
    case_id = "train/f32/B2.T4.S5.N4.K2.H6.V5/lengths-0-3/sinks/normal/s1"
    problem, do = problem_of(case_id), cotangents(case_id)[0]
    none, plain = dataclasses.replace(problem, sinks=np.full(4, -np.inf)), problem.without("sinks")
    got, expected = (oracle.compute_forward(each, empty_rows) for each in (none, plain))
    np.testing.assert_array_equal(got.logsumexp, expected.logsumexp)
    assert np.isneginf(got.logsumexp[0]).all()
    np.testing.assert_array_equal(got.out, expected.out)
    assert empty_rows == "mean" or not got.out[0].any()
    for form in ("vanilla", "flash"):
        gradients, others = (oracle.compute_backward(p, do, form=form, empty_rows=empty_rows) for p in (none, plain))
        assert not gradients.pop("dsinks").any()
        assert all(np.array_equal(gradients[name], others[name]) for name in others)
    drawn = dataclasses.replace(draw_problem(parse_case_id(case_id)), sinks=np.full(4, -np.inf, np.float32))
    bounds = compute_float64_bounds(compute_expected(drawn, Cotangent("random", do), empty_rows=empty_rows))
    assert all(not np.isnan(each.bound).any() for each in bounds.values())


@pytest.mark.parametrize("sink", [-3e38, 3e38])
def test_a_sink_as_large_as_f32_allows_is_the_whole_row_or_nothing(sink: float) -> None:
    problem = dataclasses.replace(
        problem_of("train/f32/B2.T4.S5.N4.K2.H6.V5/lengths-0-3/sinks/normal/s1"), sinks=np.full(4, sink)
    )
    got, plain = oracle.compute_forward(problem), oracle.compute_forward(problem.without("sinks"))
    assert (got.logsumexp[0] == sink).all()
    assert not got.out[0].any()
    if sink < 0:
        np.testing.assert_array_equal(got.out, plain.out)
        np.testing.assert_array_equal(got.logsumexp[1], plain.logsumexp[1])
    else:
        assert (got.logsumexp == sink).all()
        assert not got.out.any()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_nobody_may_attend_to_never_matters(poison: float) -> None:
    case_id = "train/f32/B2.T12.S15.N4.K2.H6.V5/densehead-d40/sinks/normal/s3"
    problem, (do, dlse) = problem_of(case_id), cotangents(case_id)
    dead = problem.dead_keys[..., None]
    assert dead.any()
    poisoned = dataclasses.replace(problem, k=np.where(dead, poison, problem.k), v=np.where(dead, poison, problem.v))
    clean, dirty = oracle.compute_forward(problem), oracle.compute_forward(poisoned)
    np.testing.assert_array_equal(dirty.out, clean.out)
    np.testing.assert_array_equal(dirty.logsumexp, clean.logsumexp)
    for form in ("vanilla", "flash"):
        expected, got = (oracle.compute_backward(p, do, dlse, form=form) for p in (problem, poisoned))
        assert all(np.array_equal(got[name], expected[name]) for name in expected)


def test_operands_of_sixteen_bits_are_taken_as_they_are() -> None:
    problem = draw_problem(parse_case_id("train/bf16/B1.T8.S8.N2.K2.H4.V4/full/normal/s0"))
    np.testing.assert_array_equal(oracle.compute_forward(problem).out, oracle.compute_forward(in_float64(problem)).out)


def test_a_full_mask_is_the_same_as_none_hidden() -> None:
    problem = problem_of(CASES[0])
    dense = dataclasses.replace(problem, mask=Dense(Full().dense(9, 9)))
    np.testing.assert_array_equal(oracle.compute_forward(dense).out, oracle.compute_forward(problem).out)
