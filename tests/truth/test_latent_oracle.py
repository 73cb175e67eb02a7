"""Latent attention: the absorbed form against the expanded one, and the gradient of what is key and value at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from cases import front_ends
from cases.case import CaseIdError
from cases.case_id import parse_case_id
from cases.masks import Causal, Lengths
from cases.operand_values import Cotangent, Problem, draw_cotangent, draw_problem
from conformance.truth import oracle
from conformance.truth.rounding_bounds import Bounded
from tests.comparison_asserts import assert_right, compute_expected, compute_float64_bounds, list_failures
from tests.truth.test_oracle import literal_forward

CASES = (
    "train/f32/B2.T12.S15.N4.K1.H10.V6/causal-o3/seg/softcap2/sinks/bias/scale0.3/latent/large/s1",
    "train/f32/B1.T9.S7.N2.K1.H6.V6/full/scale0.5/latent/normal/s2",
    "train/f32/B3.T5.S12.N3.K1.H8.V5/lengths-12-0-7/scale0.3/latent/heavy/s3",
)
B, T, S, N = 2, 6, 9, 4
NOPE, ROTARY, RANK, DEPTH_V = 16, 8, 32, 12
Values = dict[str, np.ndarray]


@pytest.mark.parametrize("case_id", CASES[::2])
def test_the_gradient_of_a_latent_is_what_autodiff_says(case_id: str) -> None:
    problem, drawn = draw_problem(parse_case_id(case_id)), draw_cotangent(parse_case_id(case_id))
    assert problem.tied
    assert drawn.logsumexp is not None
    lse = np.where(problem.empty_rows, 0, drawn.logsumexp) if problem.sinks is None else drawn.logsumexp
    depth = problem.v.shape[-1]
    with jax.enable_x64(True):
        names = [name for name in ("q", "k", "sinks", "bias") if getattr(problem, name) is not None]
        operands = {name: jnp.asarray(getattr(problem, name).astype(np.float64)) for name in names}

        def call(operands: dict[str, Any]) -> Any:
            return literal_forward(problem, {**operands, "v": operands["k"][..., :depth]})

        cotangents = jnp.asarray(drawn.out, jnp.float64), jnp.asarray(lse, jnp.float64)
        found = jax.jit(lambda operands: jax.vjp(call, operands)[1](cotangents)[0])(operands)
    got = oracle.compute_backward(problem, drawn.out, lse)
    assert set(got) == {f"d{name}" for name in names}
    bounds = compute_float64_bounds(compute_expected(problem, Cotangent("random", drawn.out, lse)), computations=2)
    assert_right(got, {name: Bounded(np.asarray(found[name[1:]]), bounds[name].bound) for name in got})


@pytest.mark.parametrize("case_id", CASES)
def test_flash_and_vanilla_agree(case_id: str) -> None:
    problem, drawn = draw_problem(parse_case_id(case_id)), draw_cotangent(parse_case_id(case_id))
    expected = compute_float64_bounds(compute_expected(problem, Cotangent("random", drawn.out)))
    assert_right(oracle.compute_backward(problem, drawn.out, form="flash"), expected)


def parts(case_id: str, dtype: str) -> tuple[Problem, dict[str, Bounded], dict[str, Bounded]]:
    """A tied problem, what is expected of it, and of the same problem with keys and values apart."""
    case = dataclasses.replace(parse_case_id(case_id), dtype=dtype)
    problem, drawn = draw_problem(case), draw_cotangent(case)
    apart = dataclasses.replace(problem, tied=False)
    cotangent = Cotangent("random", drawn.out)
    return problem, compute_expected(problem, cotangent), compute_expected(apart, cotangent)


@pytest.mark.parametrize("case_id", CASES)
def test_each_part_may_be_rounded_before_they_are_added(case_id: str) -> None:
    problem, tied, apart = parts(case_id, "bf16")
    dtype = ml_dtypes.bfloat16
    depth = problem.v.shape[-1]
    dk, dv = (apart[name].value.astype(dtype) for name in ("dk", "dv"))
    got = dk.copy()
    got[..., :depth] = dk[..., :depth] + dv
    # Tolerance: roundings alone, all at their worst, so that the bound itself is the limit.
    assert (np.abs(got.astype(np.float64) - tied["dk"].value) <= tied["dk"].bound).all()
    assert_right({"dk": got}, tied, dtype="bf16")
    assert list_failures({"dk": dk}, tied, dtype="bf16")  # that of values left out


@pytest.mark.parametrize("case_id", CASES)
def test_the_bound_is_the_sum_of_both_and_one_rounding(case_id: str) -> None:
    problem, tied, apart = parts(case_id, "f32")
    depth = problem.v.shape[-1]
    both = tied["dk"]
    assert "dv" not in tied
    assert (both.bound[..., depth:] == apart["dk"].bound[..., depth:]).all()
    least = apart["dk"].bound[..., :depth] + apart["dv"].bound
    assert (both.bound[..., :depth] >= least).all()
    assert (both.bound[..., :depth] <= least + 2.0**-24 * np.abs(both.value[..., :depth])).all()
    for name in ("out", "logsumexp", "dq"):
        assert (tied[name].bound == apart[name].bound).all()


def test_keys_that_nobody_sees_have_no_gradient_and_no_bound() -> None:
    problem, tied, _ = parts(CASES[2], "f32")
    dead = problem.dead_keys
    assert dead.any()
    assert not tied["dk"].value[dead].any()
    assert not tied["dk"].bound[dead].any()


@dataclasses.dataclass(frozen=True)
class Model:
    """What multi-head latent attention has before projections, all of it so coarse that products of it are exact."""

    q: np.ndarray  # [B, T, N, NOPE + ROTARY]
    c: np.ndarray  # [B, S, RANK]
    k_pe: np.ndarray  # [B, S, ROTARY]
    w_k: np.ndarray  # [N, NOPE, RANK]
    w_v: np.ndarray  # [N, DEPTH_V, RANK]
    do: np.ndarray  # [B, T, N, DEPTH_V]

    @classmethod
    def drawn(cls, seed: int) -> Model:
        """Integers from -2 to 2, divided by 4."""
        generator = np.random.default_rng(seed)
        shapes = (
            (B, T, N, NOPE + ROTARY),
            (B, S, RANK),
            (B, S, ROTARY),
            (N, NOPE, RANK),
            (N, DEPTH_V, RANK),
            (B, T, N, DEPTH_V),
        )
        return cls(*(generator.integers(-2, 3, shape) / 4.0 for shape in shapes))


MASK = Causal(S - T) & Lengths((S, S - 2))


def expanded(model: Model) -> Problem:
    """The heads that the latent stands for, through the front end: rank by the projections, rotary part shared."""
    k = np.einsum("bsr,ndr->bsnd", model.c, model.w_k)
    others = np.full((B, S, N - 1, ROTARY), 7.0)  # which nobody reads
    turned = np.concatenate([model.k_pe[:, :, None], others], axis=2)
    raw = front_ends.Raw(
        q=model.q,
        k=np.concatenate([k, turned], axis=-1),
        v=np.einsum("bsr,nvr->bsnv", model.c, model.w_v),
    )
    return Problem(*front_ends.apply_front_end(("decoupled",), raw), mask=MASK)


def absorbed(model: Model) -> Problem:
    """The same with the projection of keys in q: queries and rotary part turned as the front end turns them."""
    turned = expanded(model)
    q = np.concatenate([np.einsum("btnd,ndr->btnr", model.q[..., :NOPE], model.w_k), turned.q[..., NOPE:]], axis=-1)
    latent = np.concatenate([model.c, turned.k[:, :, 0, NOPE:]], axis=-1)[:, :, None]
    return Problem(q, latent, latent[..., :RANK], mask=MASK, scale=(NOPE + ROTARY) ** -0.5, tied=True)


def of_expanded(model: Model) -> Values:
    """Results, and gradients of what both forms have: queries, latent, turned rotary part, projections."""
    problem = expanded(model)
    found, gradients = oracle.compute_forward(problem), oracle.compute_backward(problem, model.do)
    dk, dv = gradients["dk"], gradients["dv"]
    dc = np.einsum("bsnd,ndr->bsr", dk[..., :NOPE], model.w_k) + np.einsum("bsnv,nvr->bsr", dv, model.w_v)
    return {
        "out": found.out,
        "logsumexp": found.logsumexp,
        "dq": gradients["dq"],
        "dc": dc,
        "dk_pe": dk[..., NOPE:].sum(axis=2),
        "dw_k": np.einsum("bsnd,bsr->ndr", dk[..., :NOPE], model.c),
        "dw_v": np.einsum("bsnv,bsr->nvr", dv, model.c),
    }


def of_absorbed(model: Model) -> Values:
    problem = absorbed(model)
    found = oracle.compute_forward(problem)
    gradients = oracle.compute_backward(problem, np.einsum("btnv,nvr->btnr", model.do, model.w_v))
    dq, latent = gradients["dq"], gradients["dk"][:, :, 0]
    assert set(gradients) == {"dq", "dk"}
    of_rank = np.einsum("btnr,ndr->btnd", dq[..., :RANK], model.w_k)
    return {
        "out": np.einsum("btnr,nvr->btnv", found.out, model.w_v),
        "logsumexp": found.logsumexp,
        "dq": np.concatenate([of_rank, dq[..., RANK:]], axis=-1),
        "dc": latent[..., :RANK],
        "dk_pe": latent[..., RANK:],
        "dw_k": np.einsum("btnr,btnd->ndr", dq[..., :RANK], model.q[..., :NOPE]),
        "dw_v": np.einsum("btnv,btnr->nvr", model.do, found.out),
    }


@pytest.mark.parametrize("seed", range(2))
def test_the_absorbed_form_is_the_expanded_one(seed: int) -> None:
    model = Model.drawn(seed)
    one, other = of_expanded(model), of_absorbed(model)
    for name, value in one.items():
        # Tolerance: float64 rounds sums of some hundred terms of at most a few hundred, which is far below 1e-11.
        np.testing.assert_allclose(other[name], value, rtol=0, atol=1e-11, err_msg=name)
        assert np.abs(value).max() > 0.01


@pytest.mark.parametrize("wrong", ["scale", "rotary", "values"])
def test_what_is_wrong_in_the_absorbed_form_is_another_result(wrong: str) -> None:
    model = Model.drawn(0)
    problem, truth = absorbed(model), of_expanded(model)["out"]
    if wrong == "scale":
        problem = dataclasses.replace(problem, scale=problem.k.shape[-1] ** -0.5)
    elif wrong == "rotary":
        problem = dataclasses.replace(problem, k=np.where(np.arange(RANK + ROTARY) < RANK, problem.k, 0))
    else:
        problem = dataclasses.replace(problem, v=np.roll(problem.k, -ROTARY, axis=-1)[..., :RANK], tied=False)
    out = np.einsum("btnr,nvr->btnv", oracle.compute_forward(problem).out, model.w_v)
    assert np.abs(out - truth).max() > 0.01


def test_values_of_a_tied_problem_are_its_keys_whatever_is_given() -> None:
    problem = draw_problem(parse_case_id(CASES[0]))
    other = dataclasses.replace(problem, k=2 * problem.k, v=np.zeros_like(problem.v))
    assert (other.v == other.k[..., :6]).all()
    half = problem.map_along("S", lambda x, axis: x.take(range(0, 15, 2), axis))
    assert (half.v == half.k[..., :6]).all()


@pytest.mark.parametrize(
    ("case_id", "message"),
    [
        ("train/f32/B1.T8.S8.N4.K2.H16.V8/full/latent/normal/s0", "K must be 1, got 2"),
        ("train/f32/B1.T8.S8.N4.K1.H16.V24/full/latent/normal/s0", "V must be at most that, got 24"),
        ("train/f32/B1.T8.S8.N4.K1.H16.V8/full/latent16/normal/s0", "is a cache"),
        ("decode/f32/B1.T1.S8.N4.K1.H16.V8/full/kvint8-token/latent/normal/s0", "cannot be combined with"),
        ("train/f32/B1.T8.S8.N4.K1.H24.V8/full/latent/front-decoupled/normal/s0", "cannot be combined with"),
        ("train/f32/B2.T8.S8.N4.K1.H24.V8/full/latent-q8-3/normal/s0", "only packed ones have lengths"),
    ],
)
def test_a_case_that_is_no_latent_is_refused(case_id: str, message: str) -> None:
    with pytest.raises(CaseIdError, match=message):
        parse_case_id(case_id)


@pytest.mark.parametrize("storage", ["latent", "latent16-q9-1-1-8", "latentshared4-q9-1-1-8"])
def test_an_id_with_a_latent_parses_back(storage: str) -> None:
    mask = "full" if storage == "latent" else "own-linf-37-16-17-8"
    case = parse_case_id(f"prefill/f32/B4.T9.S37.N4.K1.H24.V16/{mask}/scale0.3/{storage}/normal/s0")
    assert parse_case_id(case.id) == case
    assert ("latent" if storage == "latent" else "latent_pages") in case.features
    assert draw_problem(case).tied
