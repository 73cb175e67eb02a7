"""Plain and blocked attention against the float64 oracle, and what the oracle does not see."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.case import Case, parse
from cases.inputs import Cotangent, Problem, draw, draw_cotangent
from cases.masks import Causal, Dense, Full, Lengths, LoadBalancedCausal, Mask, Window
from conformance.contract import Implementation
from impls import block_flash, dot_product
from impls.block_flash.schedule import BlockFlashPlan
from tests.judged import assert_attention

# Compiles faster; only run time, of no interest here, suffers.
FAST_COMPILE = {"xla_backend_optimization_level": 0}

SMALL_BLOCKS = block_flash.implementation("small_blocks", block_q=32, block_kv=48)
BOTH = (*dot_product.IMPLEMENTATIONS, SMALL_BLOCKS)
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
    """The differentiable operands that the problem has."""
    found = {name: getattr(problem, name) for name in ("q", "k", "v", "sinks", "bias")}
    return {name: jnp.asarray(x) for name, x in found.items() if x is not None}


def bind(impl: Implementation, problem: Problem) -> Callable[..., Any]:
    """The call as a function of the differentiable operands only, with residuals."""
    return lambda x: impl.call(
        **x,
        mask=problem.mask,
        segment_ids=problem.segment_ids,
        soft_cap=problem.soft_cap,
        scale=problem.scale,
        save_residuals=True,
    )


def run(impl: Implementation, problem: Problem, cotangent: Cotangent) -> dict[str, np.ndarray]:
    """Forward observables and gradients by name."""

    @compiled
    def both(x: dict[str, jax.Array], do: jax.Array, dlse: jax.Array) -> dict[str, jax.Array]:
        (out, residuals), vjp = jax.vjp(bind(impl, problem), x)
        # A cotangent of max_logits must have no effect.
        (gradients,) = vjp((do, {"logsumexp": dlse, "max_logits": jnp.ones_like(dlse)}))
        return {"out": out, **residuals} | {f"d{name}": g for name, g in gradients.items()}

    return jax.tree.map(np.asarray, both(operands(problem), cotangent.out, cotangent.logsumexp))


def check(impl: Implementation, case_id: str) -> None:
    problem, cotangent = draw(parse(case_id)), draw_cotangent(parse(case_id))
    assert_attention(run(impl, problem, cotangent), problem, cotangent, arithmetic=impl.arithmetic)


@pytest.mark.parametrize("impl", BOTH, ids=lambda impl: impl.name)
@pytest.mark.parametrize("case_id", CASES)
def test_forward_and_gradients_match_the_oracle(impl: Implementation, case_id: str) -> None:
    check(impl, case_id)


@pytest.mark.parametrize("block", [32, 64, 128])
def test_block_sizes_agree(block: int) -> None:
    impl = block_flash.implementation("block", block_q=block, block_kv=block)
    check(impl, "train/f32/B1.T150.S170.N2.K1.H16.V16/causal-o20/seg/softcap8/sinks/biashead/normal/s20")


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
    check(dot_product.implementation("variant", **options), JOINT.replace("f32", "bf16"))


def test_logits_are_rounded_only_without_both_float32_options() -> None:
    problem = draw(parse("train/bf16/B1.T40.S40.N2.K2.H16.V16/causal/normal/s1"))

    def rounded(**options: Any) -> bool:
        impl = dot_product.implementation("variant", **options)
        _, residuals = compiled(bind(impl, problem))(operands(problem))
        x = residuals["max_logits"]
        return bool((x == x.astype(jnp.bfloat16).astype(jnp.float32)).all())

    assert rounded(float32_logits=False, float32_qk_product=False)
    assert not rounded(float32_logits=False)
    assert not rounded(float32_qk_product=False)


@pytest.mark.parametrize("impl", BOTH, ids=lambda impl: impl.name)
def test_what_nobody_attends_to_never_matters(impl: Implementation) -> None:
    case = parse(JOINT.replace("/seg/", "/segpad/"))
    problem, cotangent = draw(case), draw_cotangent(case)
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
    problem = dataclasses.replace(draw(case), mask=mask)
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


@pytest.mark.parametrize(
    ("mask", "pairs", "masked"),
    [
        (Full(), 16, False),
        (Causal(), 10, True),
        (Window(31, 0), 7, True),
        (Dense(np.kron(np.eye(4, dtype=bool), np.ones((32, 32), bool))), 4, False),
        (Lengths((0, 40)), 8, True),
    ],
    ids=repr,
)
def test_empty_blocks_are_not_scheduled(mask: Mask, pairs: int, masked: bool) -> None:
    schedule = plan(mask).schedule
    assert len(schedule.pairs.q) == pairs
    assert schedule.masked == masked


def plan(mask: Mask, length: int = 128) -> BlockFlashPlan:
    return BlockFlashPlan(
        mask=mask,
        num_q_heads=2,
        num_kv_heads=2,
        q_length=length,
        kv_length=length,
        block_q=32,
        block_kv=32,
        scale=1.0,
        soft_cap=None,
        masked_at_run_time=False,
    )


def test_only_partial_blocks_of_a_dense_mask_are_stored() -> None:
    array = np.kron(np.tri(4, dtype=bool), np.ones((32, 32), bool))
    array[70, 3] = False
    stored = plan(Dense(array)).schedule.stored
    assert stored is not None
    assert len(stored) == 2
    assert stored[0].all()
    np.testing.assert_array_equal(stored[1, 0, 0], array[64:96, :32])


@pytest.mark.parametrize("mask", [Causal(), Causal() & Lengths((700,))], ids=repr)
def test_memory_is_linear_in_the_length(mask: Mask) -> None:
    def temporaries(length: int) -> int:
        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return block_flash.attention(q, k, v, mask=mask).sum()

        x = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.float32)
        step = compiled(jax.grad(loss, argnums=(0, 1, 2)))
        return step.lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    one, two, four = (temporaries(length) for length in (1024, 2048, 4096))
    # Growth by a fixed number of bytes a position; a [T, S] array of f32 alone would add 16 MiB a head.
    assert (four - two) / 2048 < 1.1 * (two - one) / 1024


def test_vmap_and_a_loop_are_right_for_each() -> None:
    case = parse("train/f32/B1.T40.S50.N2.K1.H8.V8/causal-o10/sinks/normal/s3")
    problem, cotangent = draw(case), draw_cotangent(case)
    f = bind(block_flash.implementation("small", block_q=16, block_kv=16), problem)
    do = (cotangent.out, {"logsumexp": cotangent.logsumexp, "max_logits": np.zeros_like(cotangent.logsumexp)})

    def gradients(x: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return jax.vjp(f, x)[1](do)[0]

    whole = operands(problem)
    stacked = jax.tree.map(lambda a: jnp.stack([a, a / 2]), whole)
    halves: dict[str, Any] = {name: np.asarray(x / 2) for name, x in whole.items()}
    halved = dataclasses.replace(problem, **halves)
    for run_all in (jax.vmap(gradients), lambda xs: jax.lax.map(gradients, xs)):
        found = compiled(run_all)(stacked)
        for number, drawn in enumerate((problem, halved)):
            assert_attention({f"d{name}": x[number] for name, x in found.items()}, drawn, cotangent)


def test_named_residuals_spare_the_forward_pass_under_remat() -> None:
    def scans(policy: Any) -> int:
        f = functools.partial(block_flash.attention, mask=Causal())
        remat = jax.checkpoint(lambda q: f(q, q, q).sum(), policy=policy)
        return count_scans(jax.make_jaxpr(jax.value_and_grad(remat))(jnp.ones((1, 256, 1, 8))).jaxpr)

    policies = jax.checkpoint_policies
    assert scans(policies.nothing_saveable) == 3
    assert scans(policies.save_only_these_names("out", "logsumexp")) == 2


@pytest.mark.parametrize("call", [dot_product.attention, block_flash.attention])
def test_slopes_are_constants(call: Callable[..., Any]) -> None:
    problem = draw(parse("train/f32/B1.T16.S24.N2.K1.H8.V8/full/alibi/normal/s0"))
    q, k, v = (jnp.asarray(x) for x in (problem.q, problem.k, problem.v))
    assert problem.alibi_slopes is not None
    gradient = jax.grad(lambda slopes: call(q, k, v, alibi_slopes=slopes).sum())(jnp.asarray(problem.alibi_slopes))
    np.testing.assert_array_equal(gradient, np.zeros(2))


def count_scans(jaxpr: Any) -> int:
    """Scans in `jaxpr` and in all that it calls."""
    inner = [getattr(value, "jaxpr", value) for eqn in jaxpr.eqns for value in eqn.params.values()]
    own = sum(eqn.primitive.name == "scan" for eqn in jaxpr.eqns)
    return own + sum(count_scans(x) for x in inner if hasattr(x, "eqns"))


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
        dot_product.implementation("variant", block_q=3)


@pytest.mark.parametrize("impl", BOTH, ids=lambda impl: impl.name)
def test_operands_are_checked_before_any_work(impl: Implementation) -> None:
    x = jnp.ones((1, 8, 2, 4))
    with pytest.raises(ValueError, match="k has head_dim 3"):
        impl.call(x, x[..., :3], x, mask=Full())
    with pytest.raises(ValueError, match="soft_cap must be positive"):
        impl.call(x, x, x, mask=Full(), soft_cap=0.0)
