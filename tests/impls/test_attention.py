"""Plain and blocked attention against the float64 oracle, and properties that the oracle does not cover."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.case import Case
from cases.case_id import parse_case_id
from cases.masks import Causal, Dense, Full, Lengths, LoadBalancedCausal, Mask
from cases.operand_values import Cotangent, Problem, draw_cotangent, draw_problem
from impls import block_flash, dot_product
from impls.contract.implementation import Implementation
from tests.comparison_asserts import assert_attention

# Compiles faster; only run time, of no interest here, suffers.
FAST_COMPILE = {"xla_backend_optimization_level": 0}

SMALL_BLOCKS = block_flash.build_implementation("small_blocks", block_q=32, block_kv=48)
BOTH = (dot_product.build_implementation("dot_product"), SMALL_BLOCKS)
JOINT = (
    "train/f32/B2.T50.S70.N4.K2.H16.V24/densebatch-d40_and_window-l40-r60/seg/softcap5/sinks/bias/scale0.3/normal/s1"
)
CASES = (
    "train/f32/B1.T64.S96.N2.K2.H16.V16/full/normal/s1",
    "train/f32/B1.T70.S100.N2.K1.H16.V16/causal-o30/cancel/s2",
    "train/f32/B1.T100.S100.N2.K2.H16.V16/window-l20-r7/dominant/s3",
    "train/f32/B1.T100.S100.N2.K2.H16.V16/chunked-30/heavy/s4",
    "train/f32/B1.T100.S100.N2.K2.H16.V16/causal_or_spans-8-24-40-99/ties/s5",
    "train/f32/B1.T96.S96.N2.K2.H16.V16/balanced-3/large/s6",
    "train/f32/B3.T50.S70.N2.K2.H16.V16/causal-o20_and_lengths-0-33-70/normal/s7",
    "train/f32/B1.T50.S70.N2.K2.H16.V16/dense-d40/normal/s8",
    "train/f32/B1.T50.S70.N4.K2.H16.V16/densehead-d40/sinks/biashead/normal/s9",
    "train/bf16/B2.T70.S70.N6.K2.H16.V8/causal/segpad/softcap3/sinks/biaskey/knee/s10",
    "train/f16/B1.T70.S70.N2.K2.H16.V16/causal/huge/s11",
    "train/f32/B2.T1.S77.N4.K1.H16.V16/lengths-50-77/sinks/normal/s12",
    "train/f32/B1.T1500.S40.N2.K2.H8.V8/causal/normal/s13",
    JOINT,
    JOINT.replace("f32", "bf16"),
    JOINT.replace("f32", "f16"),
)


def compiled(f: Callable[..., Any]) -> Any:
    return jax.jit(f, compiler_options=FAST_COMPILE)


def operands(problem: Problem) -> dict[str, Any]:
    """List the differentiable operands of a problem."""
    found = {name: getattr(problem, name) for name in ("q", "k", "v", "sinks", "bias")}
    return {name: jnp.asarray(x) for name, x in found.items() if x is not None}


def bind(impl: Implementation, problem: Problem) -> Callable[..., Any]:
    """Bind the call as a function of the differentiable operands, with residuals."""
    return lambda x: impl.call(
        **x,
        mask=problem.mask,
        segment_ids=problem.segment_ids,
        soft_cap=problem.soft_cap,
        scale=problem.scale,
        save_residuals=True,
    )


def run(impl: Implementation, problem: Problem, cotangent: Cotangent) -> dict[str, np.ndarray]:
    """Compute forward observables and gradients by name."""

    @compiled
    def both(x: dict[str, jax.Array], do: jax.Array, dlse: jax.Array) -> dict[str, jax.Array]:
        (out, residuals), vjp = jax.vjp(bind(impl, problem), x)
        # A cotangent of max_logits must have no effect.
        (gradients,) = vjp((do, {"logsumexp": dlse, "max_logits": jnp.ones_like(dlse)}))
        return {"out": out, **residuals} | {f"d{name}": g for name, g in gradients.items()}

    return jax.tree.map(np.asarray, both(operands(problem), cotangent.out, cotangent.logsumexp))


def check(impl: Implementation, case_id: str) -> None:
    problem, cotangent = draw_problem(parse_case_id(case_id)), draw_cotangent(parse_case_id(case_id))
    assert_attention(run(impl, problem, cotangent), problem, cotangent, arithmetic=impl.arithmetic)


@pytest.mark.parametrize("impl", BOTH, ids=lambda impl: impl.name)
@pytest.mark.parametrize("case_id", CASES)
def test_forward_and_gradients_match_the_oracle(impl: Implementation, case_id: str) -> None:
    check(impl, case_id)


@pytest.mark.parametrize(
    "options",
    [
        {"compute_axis_order": (0, 2, 1, 3)},
        {"float32_qk_product": False},
        {"float32_logits": False, "float32_qk_product": False, "compute_axis_order": (0, 2, 1, 3)},
    ],
    ids=str,
)
def test_dot_product_options_stay_within_their_declared_arithmetic(options: dict[str, Any]) -> None:
    check(dot_product.build_implementation("variant", **options), JOINT.replace("f32", "bf16"))


def test_logits_are_rounded_only_without_both_float32_options() -> None:
    problem = draw_problem(parse_case_id("train/bf16/B1.T40.S40.N2.K2.H16.V16/causal/normal/s1"))

    def rounded(**options: Any) -> bool:
        impl = dot_product.build_implementation("variant", **options)
        _, residuals = compiled(bind(impl, problem))(operands(problem))
        x = residuals["max_logits"]
        return bool((x == x.astype(jnp.bfloat16).astype(jnp.float32)).all())

    assert rounded(float32_logits=False, float32_qk_product=False)
    assert not rounded(float32_logits=False)
    assert not rounded(float32_qk_product=False)


@pytest.mark.parametrize("impl", BOTH, ids=lambda impl: impl.name)
def test_what_nobody_attends_to_never_matters(impl: Implementation) -> None:
    case = parse_case_id(JOINT.replace("/seg/", "/segpad/"))
    problem, cotangent = draw_problem(case), draw_cotangent(case)
    dead = problem.dead_keys[..., None]
    assert dead.any()
    assert problem.bias is not None
    poisoned = dataclasses.replace(
        problem,
        k=np.where(dead, np.float32(np.nan), problem.k),
        v=np.where(dead, np.float32(np.inf), problem.v),
        bias=np.where(problem.allowed, problem.bias, np.float32(np.nan)),
    )
    clean, got = run(impl, problem, cotangent), run(impl, poisoned, cotangent)
    for name, x in got.items():
        np.testing.assert_array_equal(x, clean[name], err_msg=name)
    assert not got["dk"][problem.dead_keys].any()
    assert not got["dv"][problem.dead_keys].any()


@pytest.mark.parametrize("impl", BOTH, ids=lambda impl: impl.name)
@pytest.mark.parametrize(
    ("mask", "sinks"),
    [(Lengths((0, 0)), False), (Lengths((0, 0)), True), (Dense(np.zeros((50, 70), bool)), False), (Causal(-9), True)],
    ids=["nothing", "only_sinks", "dense", "causal_sinks"],
)
def test_rows_that_may_attend_to_nothing(impl: Implementation, mask: Mask, sinks: bool) -> None:
    case = Case(batch=2, q_length=50, kv_length=70, head_dim=8, v_head_dim=8, sinks=sinks, soft_cap=4.0)
    problem = dataclasses.replace(draw_problem(case), mask=mask)
    got = run(impl, problem, draw_cotangent(case))
    empty = problem.empty_rows  # [B, N, T]
    assert empty.any()
    by_query = empty.transpose(0, 2, 1)
    assert not got["out"][by_query].any()
    assert not got["dq"][by_query].any()
    sink = -np.inf if problem.sinks is None else problem.sinks[None, :, None]
    np.testing.assert_array_equal(got["logsumexp"][empty], np.broadcast_to(sink, empty.shape)[empty])
    assert (got["max_logits"][empty] == -np.inf).all()
    assert all(np.isfinite(got[name]).all() for name in got if name.startswith("d"))


@pytest.mark.parametrize("call", [dot_product.attention, block_flash.attention])
def test_slopes_are_constants(call: Callable[..., Any]) -> None:
    problem = draw_problem(parse_case_id("train/f32/B1.T16.S24.N2.K1.H8.V8/full/alibi/normal/s0"))
    q, k, v = (jnp.asarray(x) for x in (problem.q, problem.k, problem.v))
    assert problem.alibi_slopes is not None
    gradient = jax.grad(lambda slopes: call(q, k, v, alibi_slopes=slopes).sum())(jnp.asarray(problem.alibi_slopes))
    np.testing.assert_array_equal(gradient, np.zeros(2))


WRONG = {
    "mask array": Dense(np.ones((4, 4), bool)),
    "mask lengths must be 1": Lengths((1, 2)),
    "mask lengths must be at most": Causal() & Lengths((99,)),
    "mask length must be the query length": LoadBalancedCausal(1, 10),
    "mask must be": np.ones((8, 8), bool),
}


@pytest.mark.parametrize("impl", BOTH, ids=lambda impl: impl.name)
@pytest.mark.parametrize("message", WRONG)
def test_a_mask_that_does_not_fit_is_refused(impl: Implementation, message: str) -> None:
    x = jnp.ones((1, 8, 2, 4))
    with pytest.raises(ValueError, match=message):
        impl.call(x, x, x, mask=WRONG[message])


def test_options_are_checked() -> None:
    x = jnp.ones((1, 8, 2, 4))
    with pytest.raises(ValueError, match="block_q must be positive, got 0"):
        block_flash.attention(x, x, x, block_q=0)
    with pytest.raises(ValueError, match="block_kv must be positive, got -3"):
        block_flash.attention(x, x, x, block_kv=-3)
    with pytest.raises(ValueError, match="compute_axis_order must be one of"):
        dot_product.attention(x, x, x, compute_axis_order=(0, 3, 1, 2))
    with pytest.raises(ValueError, match="no option block_q"):
        dot_product.build_implementation("variant", block_q=3)


@pytest.mark.parametrize("impl", BOTH, ids=lambda impl: impl.name)
def test_operands_are_checked_before_any_work(impl: Implementation) -> None:
    x = jnp.ones((1, 8, 2, 4))
    with pytest.raises(ValueError, match="k has head_dim 3"):
        impl.call(x, x[..., :3], x, mask=Full())
    with pytest.raises(ValueError, match="soft_cap must be positive"):
        impl.call(x, x, x, mask=Full(), soft_cap=0.0)
