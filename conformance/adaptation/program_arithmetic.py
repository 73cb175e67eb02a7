"""Read from a traced program what an attention function rounds to the dtype of its operands."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cases.case import Case
from cases.operand_values import DTYPES, draw_problem
from conformance.adaptation.recipe import Recipe

_EXPONENTIALS = ("exp", "exp2", "expm1", "logistic")


def read_arithmetic(function: Callable[..., Any], case: Case, recipe: Recipe) -> dict[str, tuple[Any, str]]:
    """Return what a program for a case in bf16 or f16 rounds, as declarations, each with the step that shows it.

    Nothing is run. A step counts if an equation of the program has that dtype: the product of queries and keys
    (`logits`), an exponential (`softmax`), the product of queries and the scale (`scaled_q`), the sum over the heads of
    a group in the backward pass (`group_sums`), and residuals.

    Args:
      function: the adapter of the function.
      case: a case whose depth differs from its lengths.
      recipe: what the adapter declares.
    """
    narrow = DTYPES[case.dtype]
    options: dict[str, Any] = {"causal": True} if recipe.is_causal else {}
    call = functools.partial(function, **options)
    found: dict[str, tuple[Any, str]] = {}
    try:
        program = jax.make_jaxpr(call)(*_build_operands(case))
    except Exception:  # the checks report what the call raises
        return found
    size = case.batch * case.q_length * case.num_q_heads * case.head_dim
    for equation in _iter_equations(program.jaxpr):
        name, kinds = equation.primitive.name, [getattr(x.aval, "dtype", None) for x in equation.invars]
        result = getattr(equation.outvars[0].aval, "dtype", None) if equation.outvars else None
        if name == "dot_general" and result == narrow and _get_contracted_size(equation) == case.head_dim:
            found.setdefault("logits", ("input", f"the product of queries and keys is {case.dtype}"))
        elif name in _EXPONENTIALS and kinds[0] == narrow:
            found.setdefault("logits", ("input", f"the softmax is {case.dtype}"))
            found.setdefault("softmax", ("input", f"{name} is taken of {case.dtype}"))
        elif name in ("mul", "div") and result == narrow and "softmax" not in found:
            if math.prod(equation.outvars[0].aval.shape) != size or (factor := _find_factor(equation)) == 1:
                continue
            base_two = factor is not None and abs(factor / (case.head_dim**-0.5 * math.log2(math.e)) - 1) < 0.02
            found.setdefault("scaled_q", ("base2" if base_two else True, f"queries times the scale are {case.dtype}"))
    if recipe.residuals:
        _, residuals = jax.eval_shape(functools.partial(call, save_residuals=True), *_build_operands(case))
        if any(x.dtype == narrow for x in residuals.values()):
            found["residuals"] = ("input", f"residuals are {case.dtype}")
    if "gqa" not in recipe.unsupported and recipe.declarations.get("gradients") != ():
        found |= _read_group_sums(call, case, narrow)
    return found


def _read_group_sums(call: Callable[..., Any], case: Case, narrow: Any) -> dict[str, tuple[Any, str]]:
    """Find a sum over the heads of a group in the backward pass of a call with two query heads for each key head."""
    operands = list(_build_operands(case))
    operands[0] = jnp.zeros((case.batch, case.q_length, 2 * case.num_kv_heads, case.head_dim), narrow)
    try:
        program = jax.make_jaxpr(jax.grad(lambda *x: call(*x).astype(jnp.float32).sum(), argnums=(1, 2)))(*operands)
    except Exception:  # the checks report what the call raises
        return {}
    size = math.prod(operands[1].shape)
    for equation in _iter_equations(program.jaxpr):
        if equation.primitive.name != "reduce_sum":
            continue
        before, after = equation.invars[0].aval, equation.outvars[0].aval
        if math.prod(after.shape) == size and math.prod(before.shape) == 2 * size:
            source = _find_source(program.jaxpr, equation.invars[0])
            if narrow in (before.dtype, source):
                return {"group_sums": ("input", f"dk and dv are summed over a group's heads from {case.dtype}")}
    return {}


def _find_source(jaxpr: Any, variable: Any) -> Any:
    """Return the dtype of what was converted to `variable`, as JAX does before a sum; None if nothing was."""
    for equation in _iter_equations(jaxpr):
        if variable in equation.outvars and equation.primitive.name == "convert_element_type":
            return equation.invars[0].aval.dtype
    return None


def _build_operands(case: Case) -> tuple[Any, ...]:
    problem = draw_problem(case)
    return tuple(map(jnp.asarray, (problem.q, problem.k, problem.v)))


def _get_contracted_size(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    return math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)


def _find_factor(equation: Any) -> float | None:
    """Return the number by which an equation multiplies an array; None if it is not written in the program."""
    for x in equation.invars:
        value = getattr(x, "val", None)
        if value is not None and np.ndim(value) == 0:
            number = float(value)
            return number if equation.primitive.name == "mul" else 1 / number if number else None
    return None


def _iter_equations(jaxpr: Any) -> Iterator[Any]:
    """Iterate over the equations of a program and of the programs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _iter_equations(inner)
