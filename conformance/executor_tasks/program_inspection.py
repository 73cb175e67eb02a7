"""What the call asks of a chip, read from its traced programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np

from cases.operand_values import Problem
from conformance.execution.executor import Arrays, Executor, pull_back

_OTHER_BACKENDS = ("tpu", "gpu")
# What chooses among branches by the platform that a program is lowered for.
_PLATFORM_PRIMITIVES = ("platform_index", "platform_dependent")


def inspect_program(
    executor: Executor, problem: Problem, do: np.ndarray | None
) -> tuple[list[tuple[bool, str, str]], bool, str]:
    """What the traced programs of the call, and of its gradients for a cotangent `do`, ask for.

    Returns:
      Of each product of f32 operands whether all of f32 is asked for, the precision by name, and its place in the
      source; whether some branch is chosen by the platform; and a backend on which the programs are others, or "".
    """
    traced = _trace_programs(executor, problem, do)
    operations = list(_iter_operations(traced))
    products = [_describe_product(operation) for operation in operations if _is_f32_product(operation)]
    chosen = bool({operation.primitive.name for operation in operations} & {*_PLATFORM_PRIMITIVES})
    others = (backend for backend in _OTHER_BACKENDS if _is_other_program(executor, problem, do, traced, backend))
    return products, chosen, next(others, "")


def _trace_programs(executor: Executor, problem: Problem, do: np.ndarray | None) -> tuple[Any, ...]:
    """The traced programs of the call, and of its gradients where there are any."""
    plain, arrays = executor.bind(problem)
    arrays = jax.tree.map(jax.numpy.asarray, arrays)
    found: list[Any] = [jax.make_jaxpr(plain)(arrays)]
    if do is not None:

        def pulled(arrays: Arrays, do: Any) -> Any:
            return pull_back(plain, arrays, do)

        found.append(jax.make_jaxpr(pulled)(arrays, do))
    return tuple(found)


def _iter_operations(programs: Iterable[Any]) -> Iterator[Any]:
    """Every operation of traced programs, those inside of loops, branches and kernels too."""
    for traced in programs:
        inner = getattr(traced, "jaxpr", traced)
        for operation in getattr(inner, "eqns", ()):
            yield operation
            yield from _iter_operations(_iter_programs(operation.params.values()))


def _iter_programs(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _iter_programs(value)
        elif hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns"):
            yield value


def _is_f32_product(operation: Any) -> bool:
    if operation.primitive.name != "dot_general":
        return False
    return all(getattr(x.aval, "dtype", None) == np.float32 for x in operation.invars[:2])


def _describe_product(operation: Any) -> tuple[bool, str, str]:
    precision = operation.params.get("precision")
    asked = precision if isinstance(precision, tuple) else (precision,)
    exact = all(_is_exact(one) for one in asked)
    name = "DEFAULT" if precision is None else "/".join(getattr(one, "name", str(one)) for one in asked)
    return exact, name, _describe_place(operation)


def _is_exact(precision: Any) -> bool:
    name = getattr(precision, "name", str(precision)).upper()
    return name in ("HIGHEST", "F32_F32_F32", "F64_F64_F64", "TF32_TF32_F32_X3", "BF16_BF16_F32_X9", "BF16_BF16_F32_X6")


def _describe_place(operation: Any) -> str:
    from jax._src import source_info_util  # what it says of a place is for people alone

    return str(source_info_util.summarize(operation.source_info))


def _is_other_program(
    executor: Executor, problem: Problem, do: np.ndarray | None, traced: tuple[Any, ...], backend: str
) -> bool:
    """Whether the traced program is another one if JAX says that it computes on `backend`."""
    with mock.patch.object(jax, "default_backend", return_value=backend):
        try:
            return [str(one) for one in _trace_programs(executor, problem, do)] != [str(one) for one in traced]
        except Exception:  # a path that cannot even be traced here is another one
            return True
