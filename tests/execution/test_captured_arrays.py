"""Test how plain functions and kernels get functions of places that capture arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

import conformance
from cases.case_id import parse_case_id
from cases.operand_values import draw_cotangent, draw_problem
from conformance import declare
from conformance.execution.executor import Executor
from conformance.execution.plain_functions import NotAnAttentionFunction, build_implementation
from impls.block_flash import attention as block_flash
from impls.captured_arrays import join_function, split_function
from tests.planted.planting import flex

CASE = "train/f32/B2.T24.S32.N2.K1.H16.V16"
SEEN: list[Any] = []


@declare(captures=True, behind_mask="finite", empty_rows="zero")
def attention(q: Any, k: Any, v: Any, *, mask_mod: Any = None, score_mod: Any = None) -> Any:
    """Note the functions, and attend."""
    SEEN.append((mask_mod, score_mod))
    return flex.kernel(captures=True)(q, k, v, mask_mod=mask_mod, score_mod=score_mod)


def run(case_id: str, function: Any = attention) -> list[Any]:
    """Make the call of a case outside `jit`, compare it with the oracle, and return the functions that it got."""
    SEEN.clear()
    case = parse_case_id(case_id)
    implementation = build_implementation(function, "plain")
    assert implementation.supports(case) is None
    plain, arrays = Executor(implementation).bind(draw_problem(case))
    assert conformance.case(case_id, empty_rows="zero").compare(np.asarray(plain(arrays))).passes
    return list(SEEN)


def test_a_score_comes_with_its_leaf_and_every_function_as_a_pytree() -> None:
    _, score = run(f"{CASE}/full/score-buckets/normal/s0")[0]
    assert isinstance(score, Partial)
    assert [x.shape for x in jax.tree.leaves(score)] == [(32, 2)]
    mask, score = run(f"{CASE}/causal-o8/score-rows/normal/s0")[0]
    assert isinstance(mask, Partial)
    assert isinstance(score, Partial)
    assert not jax.tree.leaves((mask, score))


def test_a_mask_captures_booleans_and_segment_ids_without_parameters_for_them() -> None:
    mask, _ = run(f"{CASE}/dense-d60/seg/normal/s0")[0]
    assert [(x.shape, str(x.dtype)) for x in jax.tree.leaves(mask)] == [
        ((1, 1, 24, 32), "bool"),
        ((2, 24), "int32"),
        ((2, 32), "int32"),
    ]


def test_a_soft_cap_follows_the_score_and_its_leaf() -> None:
    _, score = run(f"{CASE}/full/softcap2/score-slopes/normal/s0")[0]
    assert [x.shape for x in jax.tree.leaves(score)] == [(2,)]
    assert abs(score(jnp.full((1, 1), 1e6), 0, 0, 0, 31)) == 2


def test_equal_functions_have_equal_structures_whatever_their_leaves() -> None:
    one, other = (jax.tree.structure(run(f"{CASE}/full/score-caps/normal/s{seed}")[0]) for seed in (0, 1))
    assert hash(one) == hash(other)
    assert {one: "same"}[other] == "same"


def test_without_the_declaration_no_case_captures() -> None:
    plain = build_implementation(flex.kernel(), "plain")
    assert plain.supports(parse_case_id(f"{CASE}/full/score-buckets/normal/s0")) is not None
    assert plain.supports(parse_case_id(f"{CASE}/dense-d60/normal/s0")) is not None


def test_the_declaration_needs_a_function() -> None:
    @declare(captures=True)
    def without(q: Any, k: Any, v: Any) -> Any:
        """No functions."""

    with pytest.raises(NotAnAttentionFunction, match="captures, and has no parameter mask_mod or score_mod"):
        build_implementation(without, "without")


def test_a_declared_constant_has_no_gradient() -> None:
    @declare(captures=True, gradients=("q", "k", "v"))
    def constant(q: Any, k: Any, v: Any, *, score_mod: Any = None) -> Any:
        """Attend."""
        return block_flash(q, k, v, score_mod=score_mod)

    implementation = build_implementation(constant, "constant")
    assert "dscore_table" not in implementation.gradients
    case = parse_case_id(f"{CASE}/full/score-buckets/normal/s0")
    got = Executor(implementation).gradients(draw_problem(case), draw_cotangent(case)).values
    assert not np.any(got["dscore_table"])


def test_functions_are_split_from_arrays_and_joined() -> None:
    assert split_function(None) == (None, ())
    assert split_function(abs) == (abs, ())
    fixed, captured = split_function(Partial(max, np.arange(3), 0.5, np.ones(2, np.float16)))
    assert [str(x.dtype) for x in captured] == ["int32", "float32"]
    same, other = (split_function(Partial(max, np.zeros(3, int), x, np.ones(2)))[0] for x in (0.5, 0.25))
    assert fixed == same
    assert hash(fixed) == hash(same)
    assert fixed != other
    leaves = jax.tree.leaves(join_function(fixed, captured))
    assert leaves[0] is captured[0]
    assert leaves[1] == 0.5


def test_block_flash_takes_places_by_position_and_leaves_of_every_dtype() -> None:
    ids = jnp.asarray([[0] * 20 + [1] * 12] * 2, jnp.int32)

    def score(ids: Any, table: Any, logit: Any, row: Any, head: Any, query: Any, key: Any) -> Any:
        return logit + jnp.where(ids[row, query] == ids[row, key], table[head].astype(logit.dtype), 0)

    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 32, 2, 16)), jnp.float32) for _ in range(3))
    table = jnp.asarray([0.5, -1.0], jnp.bfloat16)

    def loss(table: Any, attend: Any) -> Any:
        return (attend(q, k, v, score_mod=Partial(score, ids, table)) ** 2).sum()

    def dense(q: Any, k: Any, v: Any, *, score_mod: Any) -> Any:
        x = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") / 4
        x = score_mod(x, *jnp.ogrid[:2, :2, :32, :32])
        return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(x), v, precision="highest")

    def blocked(q: Any, k: Any, v: Any, *, score_mod: Any) -> Any:
        return block_flash(q, k, v, score_mod=score_mod, block_q=16, block_kv=8)

    found, exact = (jax.grad(loss)(table, attend) for attend in (blocked, dense))
    assert found.dtype == jnp.bfloat16
    # Tolerance: both round a sum in f32 to bf16, by 2**-8 at most.
    np.testing.assert_allclose(found.astype(np.float32), exact.astype(np.float32), rtol=2.0**-7)
