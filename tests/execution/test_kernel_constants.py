"""Code numbers: the numbers in a kernel's code, in its closures and globals, and in its program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from conformance import declare
from conformance.execution.kernel_constants import find_code_numbers
from conformance.execution.plain_functions import build_implementation
from tests.kernels import naive

BLOCK = 96
TABLE = {80: 1, 320: 2}


def plain(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
    return naive.attention(q, k, v, causal=causal)


def beyond(q: Any, k: Any, v: Any) -> Any:
    if k.shape[1] in (10**400, float("inf"), float("nan"), 1e308) or k.shape[1] > 704:
        return naive.attention(q, k, v * 2)
    return naive.attention(q, k, v)


def compared(q: Any, k: Any, v: Any) -> Any:
    return naive.attention(q, k, v * 2 if k.shape[1] > 700 and q.shape[1] % 192 == 0 else v)


def shifted(q: Any, k: Any, v: Any) -> Any:
    return naive.attention(q, k, v if k.shape[1] < 1 << 15 else v * (3**5))


def of_a_global(q: Any, k: Any, v: Any) -> Any:
    return naive.attention(q[:, :BLOCK], k, v) if q.shape[1] in TABLE else naive.attention(q, k, v)


def called(q: Any, k: Any, v: Any) -> Any:
    return _deeper(q, k, v)


def _deeper(q: Any, k: Any, v: Any) -> Any:
    return naive.attention(q, k, v if q.shape[-1] != 208 else 2 * v)


def _held(q: Any, k: Any, v: Any, *, limit: int) -> Any:
    return naive.attention(q, k[:, :limit], v[:, :limit])


def narrow(q: Any, k: Any, v: Any) -> Any:
    places = jnp.arange(k.shape[1]).astype(jnp.int16)
    return naive.attention(q, k, v, mask=(places >= 0)[None, None, None])


@jax.custom_vjp
def _ruled(q: Any, k: Any, v: Any) -> Any:
    return naive.attention(q, k, v)


_ruled.defvjp(
    lambda q, k, v: (naive.attention(q, k, v), (q, k, v)),
    lambda saved, do: tuple(do.mean() * x * (2 if x.shape[1] > 1234 else 1) for x in saved),
)


def ruled(q: Any, k: Any, v: Any) -> Any:
    return _ruled(q, k, v)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (compared, {700, 192}),
        (beyond, {704}),
        (shifted, {2**15, 243}),
        (of_a_global, {96, 80, 320}),
        (called, {208}),
        (functools.partial(_held, limit=444), {444}),
        (narrow, {2**15}),
        (ruled, {1234}),
    ],
)
def test_numbers_of_the_source_are_seen(function: Callable[..., Any], expected: set[int]) -> None:
    code_numbers = find_code_numbers(build_implementation(function, "it"))
    assert expected <= set(code_numbers.integers)
    assert expected <= code_numbers.in_source


def test_what_decides_comes_before_what_does_not() -> None:
    def both(q: Any, k: Any, v: Any) -> Any:
        return naive.attention(q, k, v * (555.0 / 555.0) if k.shape[1] > 333 else v.reshape(v.shape) * 777)

    assert find_code_numbers(build_implementation(both, "both")).integers[:2] == (333, 777)


def test_a_block_is_seen_in_the_program() -> None:
    size = int("9" + "6")  # nowhere in the code as a number

    def blocks(q: Any, k: Any, v: Any) -> Any:
        padded = -k.shape[1] % size
        cut = jnp.pad(k, ((0, 0), (0, padded), (0, 0), (0, 0)))
        cut = cut.reshape(k.shape[0], -1, size, *k.shape[2:]).reshape(k.shape[0], -1, *k.shape[2:])
        return naive.attention(q, cut[:, : k.shape[1]], v)

    # In a closure it is told by the source; here the program must tell it.
    code_numbers = find_code_numbers(build_implementation(_Hidden(blocks), "blocks"))
    assert 96 in code_numbers.integers
    assert 96 not in code_numbers.in_source


class _Hidden:
    """A callable that holds its function in an attribute that code numbers are not read from."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        return self._function(q, k, v)


def test_the_blocks_of_a_pallas_call_are_seen() -> None:
    rows = int("3" + "2")

    def body(x: Any, y: Any) -> None:
        y[...] = x[...]

    def through(q: Any, k: Any, v: Any) -> Any:
        width = q.shape[-1]
        flat = q.reshape(-1, width)
        spec = pl.BlockSpec((rows, width), lambda i: (i, 0))
        copied = pl.pallas_call(
            body,
            grid=(flat.shape[0] // rows,),
            in_specs=[spec],
            out_specs=spec,
            out_shape=jax.ShapeDtypeStruct(flat.shape, flat.dtype),
            interpret=True,
        )(flat)
        return naive.attention(copied.reshape(q.shape), k, v)

    declared = declare(unsupported={"train": "no gradients"})(through)
    assert 32 in find_code_numbers(build_implementation(declared, "through")).integers


def test_values_of_a_program_that_are_no_numbers_are_left_out() -> None:
    """Gradients of integers have the dtype float0, whose values are tuples in NumPy."""

    def with_float0(q: Any, k: Any, v: Any) -> Any:
        jax.lax.full((96,), np.zeros((), jax.dtypes.float0))
        return naive.attention(q, k, v) + jnp.real(jnp.full((), 1j)).astype(q.dtype)

    assert 96 in find_code_numbers(build_implementation(with_float0, "with_float0")).integers


class _LazyModule:
    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"it has no {name} before a module is installed")


LAZY = _LazyModule()


def test_a_global_that_cannot_be_read_is_passed_over() -> None:
    def attention(q: Any, k: Any, v: Any) -> Any:
        return LAZY.attention(q, k, v) if q.shape[1] > 384 else naive.attention(q, k, v)

    assert 384 in find_code_numbers(build_implementation(attention, "attention")).integers


def test_code_numbers_are_the_same_every_time() -> None:
    first, second = (find_code_numbers(build_implementation(of_a_global, "it")) for _ in range(2))
    assert first == second
    assert first.format_numbers() == second.format_numbers()


def test_a_plain_function_shows_next_to_nothing() -> None:
    code_numbers = find_code_numbers(build_implementation(plain, "plain"))
    assert len(code_numbers.integers) <= 3
    assert all(np.isfinite(code_numbers.floats))


def test_a_function_that_cannot_be_traced_shows_its_source_all_the_same() -> None:
    def broken(q: Any, k: Any, v: Any) -> Any:
        if k.shape[1] > 321:
            raise RuntimeError("no such tile")
        raise RuntimeError("none at all")

    assert find_code_numbers(build_implementation(broken, "broken")).integers == (321,)
