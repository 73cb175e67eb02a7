"""A function of bf16 arrays, evaluated in float64, has no rounding of its own; what looks at bits is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from conformance.execution.exact_evaluation import NoExactEvaluation, evaluate_exactly

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)), jnp.bfloat16)
EXACT = np.asarray(X).astype(np.float64)


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def plainly(x: Any) -> Any:
    return jax.nn.softmax(x, axis=-1)


def block_by_block(x: Any) -> Any:
    """A softmax whose maximum and sum run over the columns, in a loop that JAX differentiates."""

    def step(carry: Any, column: Any) -> Any:
        top, total = carry
        new = jnp.maximum(top, column)
        return (new, total * jnp.exp(top - new) + jnp.exp(column - new)), None

    start = (jnp.full(x.shape[0], -jnp.inf, x.dtype), jnp.zeros(x.shape[0], x.dtype))
    (top, total), _ = lax.scan(step, start, x.T)
    return jnp.exp(x - top[:, None]) / total[:, None]


def counting(x: Any) -> Any:
    """A sum of the columns by `while`, whose counter is an integer."""

    def step(state: Any) -> Any:
        n, total = state
        return n + 1, total + jnp.exp(lax.dynamic_index_in_dim(x, n, axis=1, keepdims=False))

    total = lax.while_loop(lambda state: state[0] < x.shape[1], step, (jnp.int32(0), jnp.zeros(x.shape[0], x.dtype)))[1]
    return jnp.exp(x) / total[:, None]


def row_by_row(x: Any) -> Any:
    """A sum of each row's columns under `vmap`, where rows have other numbers of steps."""

    def add(row: Any, start: Any) -> Any:
        def step(n: Any, total: Any) -> Any:
            return total + jnp.exp(lax.dynamic_index_in_dim(row, n, keepdims=False))

        return lax.fori_loop(start, len(row), step, jnp.exp(row[:0]).sum(dtype=x.dtype))

    early = jnp.arange(len(x))
    total = jax.vmap(add)(x, early) + jnp.where(jnp.arange(x.shape[1]) < early[:, None], jnp.exp(x), 0).sum(axis=1)
    return jnp.exp(x) / total[:, None]


def by_a_branch(x: Any) -> Any:
    return lax.cond(x.sum() > -1e9, plainly, lambda x: x * 0, x)


def rounding_often(x: Any) -> Any:
    weights = jax.lax.reduce_precision(jnp.exp(x.astype(jnp.float16).astype(jnp.bfloat16)), 8, 3)
    return weights.astype(jnp.bfloat16) / weights.sum(axis=-1, keepdims=True, dtype=jnp.float32)


def through_products(x: Any) -> Any:
    weights = jnp.exp(x)
    ones = jnp.ones((x.shape[1], 1), x.dtype)
    total = lax.dot(weights, ones, precision="highest", preferred_element_type=jnp.float32)
    return weights / total


def scattered(x: Any) -> Any:
    return plainly(jnp.zeros_like(x).at[jnp.arange(4)].add(x))


def in_pallas(x: Any) -> Any:
    """Blocks of four columns, the last of which is half outside of the array, and a sum over them in a reference."""

    def sum_kernel(x_ref: Any, out_ref: Any) -> None:
        @pl.when(pl.program_id(0) == 0)
        def _() -> None:
            out_ref[...] = jnp.zeros_like(out_ref)

        column = pl.program_id(0) * 4 + jax.lax.broadcasted_iota(jnp.int32, (4, 4), 1)
        weights = jnp.where(column < 6, jnp.exp(x_ref[...].astype(jnp.float32)), 0)
        out_ref[...] += weights.sum(axis=1, keepdims=True)

    total = pl.pallas_call(
        sum_kernel,
        grid=(2,),
        in_specs=[pl.BlockSpec((4, 4), lambda n: (0, n))],
        out_specs=pl.BlockSpec((4, 1), lambda n: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((4, 1), jnp.float32),
        interpret=True,
    )(x)
    return jnp.exp(x) / total


def on_devices(x: Any) -> Any:
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("d",))

    def shard(x: Any) -> Any:
        weights = jnp.exp(x)
        return weights / lax.psum(weights.sum(axis=1, keepdims=True), "d")

    return jax.shard_map(shard, mesh=mesh, in_specs=P(None, "d"), out_specs=P(None, "d"))(x)


@pytest.mark.parametrize(
    "function",
    [
        plainly,
        block_by_block,
        counting,
        row_by_row,
        by_a_branch,
        rounding_often,
        through_products,
        scattered,
        in_pallas,
        on_devices,
        jax.vmap(lambda row: plainly(row[None])[0]),
        jax.jit(plainly),
        jax.checkpoint(plainly),
    ],
)
def test_nothing_rounds(function: Callable[..., Any]) -> None:
    found = evaluate_exactly(function, X)
    assert found.dtype == np.float64
    # 1e-14 is 90 roundings of 2^-53, and a softmax of six numbers has fewer. One rounding to f32 would be 6e-8.
    np.testing.assert_allclose(found, softmax(EXACT), rtol=1e-14)


@jax.custom_vjp
def with_own_derivative(x: Any) -> Any:
    return plainly(x)


def _save(x: Any) -> tuple[Any, Any]:
    p = plainly(x)
    return p, p


def _pull_back(p: Any, dp: Any) -> tuple[Any]:
    return (p * (dp - (p * dp).sum(axis=-1, keepdims=True)),)


with_own_derivative.defvjp(_save, _pull_back)


@pytest.mark.parametrize("function", [plainly, block_by_block, with_own_derivative, jax.checkpoint(plainly)])
def test_derivatives_do_not_round(function: Callable[..., Any]) -> None:
    def pull_back(x: Any, dp: Any) -> Any:
        return jax.vjp(function, x)[1](dp)[0]

    p = softmax(EXACT)
    expected = p * (EXACT - (p * EXACT).sum(axis=-1, keepdims=True))
    # The difference of numbers near 1 cancels: 1e-15 is nine of their roundings. One rounding to f32 would be 6e-8.
    np.testing.assert_allclose(evaluate_exactly(pull_back, X, X), expected, rtol=1e-12, atol=1e-15)


def test_a_python_number_has_the_dtype_that_it_met() -> None:
    found = evaluate_exactly(lambda x: (x * 0.1, x.astype(jnp.float32) * 0.1), X)
    np.testing.assert_array_equal(found[0], EXACT * float(jnp.bfloat16(0.1)))
    np.testing.assert_array_equal(found[1], EXACT * float(np.float32(0.1)))


def test_integers_and_booleans_stay_what_they_are() -> None:
    found = evaluate_exactly(lambda x: (jnp.arange(3, dtype=jnp.int32) // 2, x > 0, x.astype(jnp.int32)), X)
    assert [x.dtype for x in found] == [np.int32, np.bool_, np.int32]


def _by_bits(x: Any) -> Any:
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint16) & jnp.uint16(0xFFF0), jnp.bfloat16)


def _through_the_host(x: Any) -> Any:
    return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def _by_the_tpu_interpreter(x: Any) -> Any:
    from jax.experimental.pallas import tpu as pltpu

    def copy(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...]

    return pl.pallas_call(copy, out_shape=x, interpret=pltpu.InterpretParams())(x)


@pytest.mark.parametrize(
    ("function", "primitive"),
    [
        (_by_bits, "bitcast_convert_type"),
        (_through_the_host, "pure_callback"),
        (lambda x: x.astype(jnp.int8).astype(jnp.bfloat16), "convert_element_type"),
        (lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.bfloat16), "convert_element_type"),
        (_by_the_tpu_interpreter, "pallas_call"),
        (lambda x: lax.nextafter(x, x), "nextafter"),
    ],
)
def test_what_depends_on_bits_is_refused_with_its_place(function: Callable[..., Any], primitive: str) -> None:
    with pytest.raises(NoExactEvaluation, match=rf"{primitive} .*\(.*test_exact_evaluation.py:\d+"):
        evaluate_exactly(function, X)
