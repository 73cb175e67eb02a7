"""Blocked attention in plain JAX: its blocks, its memory, and its behaviour under transformations."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.case_id import parse_case_id
from cases.masks import Causal, Dense, Full, Lengths, Mask, Window
from cases.operand_values import draw_cotangent, draw_problem
from impls import block_flash
from impls.block_flash.block_schedule import BlockFlashPlan
from tests.comparison_asserts import assert_attention
from tests.impls.test_attention import bind, check, compiled, operands


@pytest.mark.parametrize("block", [32, 64, 128])
def test_block_sizes_agree(block: int) -> None:
    impl = block_flash.build_implementation("block", block_q=block, block_kv=block)
    check(impl, "train/f32/B1.T150.S170.N2.K1.H16.V16/causal-o20/seg/softcap8/sinks/biashead/normal/s20")


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
    case = parse_case_id("train/f32/B1.T40.S50.N2.K1.H8.V8/causal-o10/sinks/normal/s3")
    problem, cotangent = draw_problem(case), draw_cotangent(case)
    f = bind(block_flash.build_implementation("small", block_q=16, block_kv=16), problem)
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


def count_scans(jaxpr: Any) -> int:
    """Count the scans in `jaxpr` and in all jaxprs that it calls."""
    inner = [getattr(value, "jaxpr", value) for eqn in jaxpr.eqns for value in eqn.params.values()]
    own = sum(eqn.primitive.name == "scan" for eqn in jaxpr.eqns)
    return own + sum(count_scans(x) for x in inner if hasattr(x, "eqns"))
