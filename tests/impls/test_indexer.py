"""Traced selections of keys: one compiled program serves all of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.case_id import parse_case_id
from cases.masks import Causal, Dense, Full, Indexer, Lengths, Mask, Or, Window, relax_to_known
from cases.operand_values import Problem, draw_cotangent, draw_problem
from conformance.execution import executor  # noqa: F401  registers masks with JAX
from conformance.truth.rounding_bounds import compute_expectation
from impls import block_flash, dot_product, splash_tpu
from impls.contract.implementation import Implementation, structured_mask
from tests import comparison_asserts

CASE = parse_case_id("train/f32/B3.T40.S56.N4.K2.H16.V16/full/sinks/normal/s1")
IMPLEMENTATIONS = (
    dot_product.IMPLEMENTATIONS[0],
    block_flash.build_implementation("small", block_q=16, block_kv=24),
    splash_tpu.IMPLEMENTATIONS[0],
)


def selections() -> list[np.ndarray]:
    """Make selections that differ by batch row; one leaves a batch row without keys, and one allows nothing."""
    drawn = np.random.default_rng(0).random((2, 3, 1, 40, 56)) < 0.3
    drawn[0, 1] = False
    drawn[0, :, :, 5:9] = False
    return [*drawn, np.zeros((3, 1, 40, 56), bool)]


@pytest.mark.parametrize("with_causal", [False, True])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS, ids=lambda impl: impl.name)
def test_one_program_serves_every_selection(impl: Implementation, with_causal: bool) -> None:
    problem, do = draw_problem(CASE), draw_cotangent(CASE)
    if with_causal:
        problem = dataclasses.replace(problem, sinks=None)
    traces = []

    @jax.jit
    def run(selected: jax.Array, moving: dict[str, Any]) -> Any:
        traces.append(selected)
        mask = masked(at_run_time(selected), with_causal)

        def call(x: dict[str, Any]) -> Any:
            out, residuals = impl.call(**x, mask=mask, save_residuals=True)
            return out, residuals["logsumexp"]

        results, pull = jax.vjp(call, moving)
        return results, pull((do.out, jnp.where(jnp.isfinite(results[1]), jnp.asarray(do.logsumexp), 0.0)))[0]

    moving = {name: jnp.asarray(x) for name in ("q", "k", "v", "sinks") if (x := getattr(problem, name)) is not None}
    for selected in selections():
        (out, lse), gradients = run(jnp.asarray(selected), moving)
        here = dataclasses.replace(problem, mask=masked(Indexer(selected), with_causal))
        got = {"out": out, "logsumexp": lse} | {f"d{name}": x for name, x in gradients.items()}
        assert_right(here, do, got)
    assert len(traces) == 1


def at_run_time(selected: jax.Array) -> Indexer:
    return Indexer(selected)  # type: ignore[arg-type]  # declared for NumPy, and an array of JAX's under `jit`


def masked(indexer: Indexer, with_causal: bool) -> Mask:
    return Causal(16) & indexer if with_causal else indexer


def assert_right(problem: Problem, do: Any, got: dict[str, Any]) -> None:
    seen = ~problem.empty_rows if problem.sinks is None else np.ones_like(problem.empty_rows)
    cotangent = dataclasses.replace(do, logsumexp=np.where(seen, do.logsumexp, np.zeros_like(do.logsumexp)))
    expected = compute_expectation(problem, IMPLEMENTATIONS[0].arithmetic, [cotangent])
    comparison_asserts.assert_right(got, {**expected.forward, **expected.gradients[0]})


def test_a_mask_with_a_selection_is_an_operand_and_any_other_is_static() -> None:
    selected = Indexer(np.ones((1, 1, 2, 3), bool))
    assert structured_mask(Causal() & selected, 1, 1, 2, 3) == ({}, {"mask": Causal() & selected})
    assert structured_mask(Causal(), 1, 1, 2, 3) == ({"mask": Causal()}, {})


def test_masks_are_trees_whose_only_leaves_are_selections() -> None:
    array = np.ones((1, 1, 2, 3), bool)
    selection = Indexer(array)
    mask = Or(Causal(1) & selection, Window(1, 1) & Dense(array) & Lengths((2,)))
    leaves, tree = jax.tree.flatten(mask)
    assert len(leaves) == 1
    assert leaves[0] is selection.array
    again = jax.tree.unflatten(tree, [np.zeros_like(array)])
    assert isinstance(again, Or)
    assert again.right == mask.right
    np.testing.assert_array_equal(again.dense(2, 3), mask.right.dense(2, 3))


def test_what_is_known_of_a_traced_mask_allows_all_that_it_may() -> None:
    def check(selected: jax.Array) -> jax.Array:
        mask = Causal(1) & at_run_time(selected)
        assert mask.at_run_time
        assert not relax_to_known(mask).at_run_time
        assert relax_to_known(mask) == Causal(1) & Full()
        assert at_run_time(selected).blocks(2, 3, 1, 2).shape == (1, 1, 2, 2)
        dense: Any = mask.dense(2, 3)
        return dense

    array = np.array([[[[True, True, True], [False, True, True]]]])
    np.testing.assert_array_equal(jax.jit(check)(array), Causal(1).dense(2, 3) & array)


def test_a_selection_must_have_four_axes() -> None:
    with pytest.raises(ValueError, match=r"mask array must be \[b, n, T, S\], got shape \(2, 3\)"):
        Indexer(jnp.ones((2, 3), bool))  # type: ignore[arg-type]  # of JAX


@pytest.mark.long
def test_a_block_without_a_selected_key_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside `jit` a scan is a loop and a branch is taken or not, so that products can be counted."""
    import impls.block_flash.backward as backward
    import impls.block_flash.forward as forward
    from impls import block_arithmetic

    counts = {forward: 0, backward: 0}

    def counted(module: Any) -> Any:
        def product(*operands: Any) -> jax.Array:
            counts[module] += 1
            return block_arithmetic.multiply(*operands)

        return product

    for module in counts:
        monkeypatch.setattr(module, "multiply", counted(module))
    selected = np.zeros((2, 1, 48, 48), bool)
    selected[0, 0, 20, 3] = selected[1, 0, 40:, :20] = True  # three of the causal mask's six blocks of 16 x 16
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 48, 2, 8), np.float32))

    def loss(q: jax.Array) -> jax.Array:
        mask = at_run_time(jnp.asarray(selected)) & Causal()
        return block_flash.attention(q, x, x, mask=mask, bias=jnp.ones((1, 1, 48, 48)), block_q=16, block_kv=16).sum()

    with jax.disable_jit():
        jax.grad(loss)(x)
    assert counts == {forward: 3, backward: 3 * 4}
