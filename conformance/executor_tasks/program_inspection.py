"""Tasks of the checks `program` and `dropout`: inspect the traced programs of the call, without running them.

They find the precision that matrix products request, and whether the program depends on the platform. They also find
whether it draws random numbers by a generator that exists on a chip only.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np

from cases.operand_values import Problem
from conformance.execution import kernel_errors
from conformance.execution.executor import Arrays, Executor, pull_back

Product = tuple[bool, str, str, str]
"""A product of f32 operands: whether it requests all of f32, the name of its precision, its source line, and the error
with which JAX refuses this precision on this platform, or ""."""

_OTHER_BACKENDS = ("tpu", "gpu")
# Primitives that choose a branch by the platform that the program is lowered for.
_PLATFORM_PRIMITIVES = ("platform_index", "platform_dependent")
# Primitives of a TPU's generator (`pltpu.prng_seed`, `pltpu.prng_random_bits`), and the dtypes of its keys.
_CHIP_GENERATORS = ("prng_seed", "prng_random_bits")
_PALLAS_KEYS = ("key<pl>", "key<_pl_stateful>")


def inspect_program(executor: Executor, problem: Problem, do: np.ndarray | None) -> tuple[list[Product], bool, str]:
    """Inspect the traced programs of the call and, if a cotangent `do` is given, of its gradients.

    Returns:
      - The products of f32 operands.
      - Whether the program has a branch by platform.
      - A backend for which another program is traced than here, or "".
    """
    with jax.default_matmul_precision(None):  # a setting of JAX is no request of the kernel
        traced = _trace_programs(executor, problem, do)
    operations = list(iter_operations(traced))
    products = [_describe_product(operation) for operation in operations if _is_f32_product(operation)]
    has_branches = bool({operation.primitive.name for operation in operations} & {*_PLATFORM_PRIMITIVES})
    dependent = (backend for backend in _OTHER_BACKENDS if _is_other_program(executor, problem, do, traced, backend))
    return products, has_branches, next(dependent, "")


def find_chip_generator(executor: Executor, problem: Problem, do: np.ndarray | None) -> str:
    """Return the operation by which call or gradients draw random numbers on a TPU, or "" if there is none.

    JAX's interpreters do not compute such operations: the slow one gives zeros, the fast one refuses them (JAX 0.10.2).
    """
    try:
        traced = _trace_programs(executor, problem, do)
    except Exception:  # ignored here: the check makes the same calls and reports the exception
        return ""
    return next(filter(None, map(_describe_chip_generator, iter_operations(traced))), "")


def _describe_chip_generator(operation: Any) -> str:
    """Return the name of an operation that draws by a TPU's generator, also through a key of Pallas; "" for others."""
    name = operation.primitive.name
    has_key = any(str(getattr(x.aval, "dtype", "")) in _PALLAS_KEYS for x in operation.invars)
    return name if name in _CHIP_GENERATORS or (has_key and name == "random_bits") else ""


def _trace_programs(executor: Executor, problem: Problem, do: np.ndarray | None) -> tuple[Any, ...]:
    """Trace the call and, if a cotangent is given, its gradients."""
    plain, arrays = executor.bind(problem)
    arrays = jax.tree.map(jax.numpy.asarray, arrays)
    programs: list[Any] = [jax.make_jaxpr(plain)(arrays)]
    if do is not None:

        def compute_gradients(arrays: Arrays, do: Any) -> Any:
            return pull_back(plain, arrays, do)

        programs.append(jax.make_jaxpr(compute_gradients)(arrays, do))
    return tuple(programs)


def iter_operations(programs: Iterable[Any]) -> Iterator[Any]:
    """Yield every operation of traced programs, including those in loops, branches and kernels."""
    for traced in programs:
        inner = getattr(traced, "jaxpr", traced)
        for operation in getattr(inner, "eqns", ()):
            yield operation
            yield from iter_operations(_iter_programs(operation.params.values()))


def _iter_programs(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the traced programs (jaxprs) among the parameters of an operation."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _iter_programs(value)
        elif hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns"):
            yield value


def _is_f32_product(operation: Any) -> bool:
    """Return whether an operation multiplies two f32 operands."""
    if operation.primitive.name != "dot_general":
        return False
    return all(getattr(x.aval, "dtype", None) == np.float32 for x in operation.invars[:2])


def _describe_product(operation: Any) -> Product:
    precision = operation.params.get("precision")
    requested = precision if isinstance(precision, tuple) else (precision,)
    exact = all(_is_exact(one) for one in requested)
    name = "DEFAULT" if precision is None else "/".join(getattr(one, "name", str(one)) for one in requested)
    return exact, name, describe_place(operation), _find_refusal(precision)


@functools.cache
def _find_refusal(precision: Any) -> str:
    """Return the error with which JAX refuses a precision of f32 products on this platform, or ""."""
    x = np.zeros((1, 1), np.float32)
    try:
        jax.jit(functools.partial(jax.lax.dot, precision=precision)).lower(x, x)
    except ValueError as error:
        if kernel_errors.is_refused_precision(error):
            return str(error)
    return ""


def _is_exact(precision: Any) -> bool:
    name = getattr(precision, "name", str(precision)).upper()
    return name in ("HIGHEST", "F32_F32_F32", "F64_F64_F64", "TF32_TF32_F32_X3", "BF16_BF16_F32_X9", "BF16_BF16_F32_X6")


def describe_place(operation: Any) -> str:
    """Describe the source line of an operation."""
    from jax._src import source_info_util  # private API, used only for a message

    return str(source_info_util.summarize(operation.source_info))


def _is_other_program(
    executor: Executor, problem: Problem, do: np.ndarray | None, traced: tuple[Any, ...], backend: str
) -> bool:
    """Return whether the traced program changes if JAX reports `backend` as its backend."""
    with mock.patch.object(jax, "default_backend", return_value=backend):
        try:
            return [str(one) for one in _trace_programs(executor, problem, do)] != [str(one) for one in traced]
        except Exception:  # a program that cannot be traced differs from the one that was traced above
            return True
