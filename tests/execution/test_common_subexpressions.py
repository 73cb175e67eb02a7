"""Equal parts of a program are computed once, and nothing else is merged."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.case_id import parse_case_id
from cases.operand_values import draw_problem
from conformance.execution import implementation_registry
from conformance.execution.common_subexpressions import eliminate_common_subexpressions
from conformance.execution.executor import Executor

X = jnp.arange(6.0).reshape(2, 3)


@functools.partial(jax.jit, static_argnums=2)
def loop(x: jax.Array, step: Any, times: int) -> tuple[jax.Array, jax.Array]:
    """Return two results of one loop."""
    return jax.lax.fori_loop(0, times, lambda _, pair: (pair[0] + step, pair[1] * 2), (x, x))


def loops(function: Any, *args: Any) -> int:
    """Count the loops in the compiled function."""
    text = jax.jit(eliminate_common_subexpressions(function)).lower(*args).compile().as_text()
    assert text is not None
    return text.count(" while(")


def same_as_before(function: Any, *args: Any) -> None:
    before, after = jax.jit(function)(*args), jax.jit(eliminate_common_subexpressions(function))(*args)
    assert jax.tree.structure(before) == jax.tree.structure(after)  # type: ignore[operator] # untyped upstream
    for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert (one.dtype, one.weak_type) == (other.dtype, other.weak_type)
        np.testing.assert_array_equal(one, other)


def test_what_is_asked_for_twice_is_computed_once() -> None:
    def twice(x: jax.Array) -> Any:
        return {"first": loop(x + 1, 1.0, 3), "again": loop(x + 1, 1.0, 3), "after": loop(x + 1, 1.0, 3)[0] + x}

    assert loops(twice, X) == 1
    same_as_before(twice, X)


def test_a_result_that_only_the_repetition_uses_is_there() -> None:
    def other_halves(x: jax.Array) -> Any:
        return loop(x, 1.0, 3)[0], loop(x, 1.0, 3)[1]

    assert loops(other_halves, X) == 1
    same_as_before(other_halves, X)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: loop(x, 2.0, 3),
        lambda x: loop(x, 1.0, 4),
        lambda x: loop(x.astype(jnp.bfloat16), 1.0, 3),
    ],
)
def test_what_differs_in_anything_is_computed_by_itself(other: Any) -> None:
    def both(x: jax.Array) -> Any:
        return loop(x, 1.0, 3), other(x)

    assert loops(both, X) == 2
    same_as_before(both, X)


def test_zeros_of_both_signs_and_nans_are_numbers_of_their_own() -> None:
    def both(x: jax.Array) -> Any:
        return jax.lax.div(x, -0.0), jax.lax.div(x, 0.0), jax.lax.mul(x, jnp.nan), jax.lax.mul(x, jnp.nan)

    same_as_before(both, X)


def test_constants_of_one_value_are_one_and_of_another_are_not() -> None:
    def plus(numbers: list[float]) -> Any:
        return lambda x: loop(x + np.asarray(numbers, np.float32), 1.0, 3)

    def of(*constants: list[float]) -> Any:
        return lambda x: [plus(numbers)(x) for numbers in constants]

    assert loops(of([1, 2, 3], [1, 2, 3]), X) == 1
    assert loops(of([1, 2, 3], [1, 2, 4]), X) == 2
    same_as_before(of([1, 2, 3], [1, 2, 4], [0, 2, 3], [-0.0, 2, 3]), X)


def test_what_does_more_than_compute_is_done_each_time() -> None:
    heard: list[int] = []

    def hear(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: heard.append(1))
        return x + 1

    jax.jit(eliminate_common_subexpressions(lambda x: (hear(x), hear(x))))(X)
    jax.effects_barrier()
    assert len(heard) == 2


def test_an_error_is_the_functions_own() -> None:
    def refuses(x: jax.Array) -> Any:
        raise NotImplementedError("takes no arrays")

    with pytest.raises(NotImplementedError, match="takes no arrays"):
        jax.jit(eliminate_common_subexpressions(refuses))(X)


@pytest.mark.parametrize("name", ["block_flash", "flash_gpu", "splash_tpu", "ragged_tpu", "ragged_gpu"])
def test_a_kernel_that_always_computes_its_residuals_is_judged_by_one_run_of_it(name: str) -> None:
    problem = draw_problem(parse_case_id("prefill/f32/B1.T64.S128.N2.K2.H64.V64/causal/normal/s0"))
    compiled, arrays = Executor(implementation_registry.find_implementation(name)).compiled(problem)
    once = compiled.residuals.lower(arrays).as_text().count("stablehlo.while")  # type: ignore[attr-defined] # jitted
    assert once
    text = compiled.calls.lower(arrays).as_text()  # type: ignore[attr-defined] # likewise
    assert text.count("stablehlo.while") == once
    assert sum(text.count(f"call @{kernel}") for kernel in ("_flash", "_splash", "_run")) == 1
