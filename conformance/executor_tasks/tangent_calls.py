"""Tasks that differentiate the call along directions, for the check `tangents`.

A direction has a tangent for each operand that moves, by the operand's name. Directions are stacked: each array has one
more axis, which comes first. All operands that are named move in all of them, some by zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from cases.operand_values import Problem
from conformance.execution import returned_values
from conformance.execution.executor import Arrays, Executor, Values

How = Literal["jvp", "linearize", "jacfwd"]
Order = Literal["jvp_of_grad", "grad_of_jvp"]


def run_tangents(
    executor: Executor, problem: Problem, directions: Arrays, names: Sequence[str], how: How = "jvp"
) -> Values:
    """Return the stacked tangents of the results `names` (`out`, `logsumexp`), as `how` says.

    If `names` has both, `out_saved` is that of the call which returns residuals too. `jvp` and `linearize` take one
    direction after another. `jacfwd` differentiates by the distances along all of them,
    so the call is mapped over directions.
    """
    call, moving = _bind_moving(executor, problem, directions, names)

    def transform(moving: Arrays, directions: Arrays) -> Any:
        if how == "jacfwd":
            count = len(next(iter(directions.values())))
            return jax.jacfwd(lambda steps: call(_walk(moving, directions, steps)))(jnp.zeros(count, jnp.float32))
        push = jax.linearize(call, moving)[1] if how == "linearize" else functools.partial(_push, call, moving)
        return jax.lax.map(push, directions)

    tangents = executor.jit(transform)(moving, dict(directions))
    return {name: np.asarray(np.moveaxis(x, -1, 0) if how == "jacfwd" else x) for name, x in tangents.items()}


def run_gradient_tangents(
    executor: Executor, problem: Problem, direction: Arrays, do: np.ndarray, order: Order
) -> Values:
    """Return the derivatives of the gradients for the cotangent `do` along a direction, by the operand's name.

    They are computed as tangents of gradients, or as gradients of `<dot out, do>`. Both are the same in exact numbers.
    """
    call, moving = _bind_moving(executor, problem, direction, ["out"])

    def compute(moving: Arrays, direction: Arrays, do: Any) -> Any:
        def weigh(out: Any) -> Any:
            return jnp.vdot(out.astype(jnp.float32), do.astype(jnp.float32))

        if order == "jvp_of_grad":
            gradient = jax.grad(lambda moving: weigh(call(moving)["out"]))
            return jax.jvp(gradient, (moving,), (direction,))[1]
        return jax.grad(lambda moving: weigh(_push(call, moving, direction)["out"]))(moving)

    found = executor.jit(compute)(moving, dict(direction), do)
    return {name: np.asarray(x) for name, x in found.items()}


def _bind_moving(
    executor: Executor, problem: Problem, direction: Arrays, names: Sequence[str]
) -> tuple[Callable[[Arrays], Any], Arrays]:
    """Return the call as a function of the operands that move, which returns the results `names`, and its arguments."""
    plain, arrays = executor.bind(problem)
    statics, _ = executor.arguments(problem)
    moving = {name: jnp.asarray(arrays[name]) for name in direction}
    fixed = {name: x for name, x in arrays.items() if name not in direction}

    def call(moving: Arrays) -> Any:
        found = {"out": plain({**fixed, **moving})} if "out" in names else {}
        if "logsumexp" in names:
            given = {**fixed, **moving, **statics, "save_residuals": True}
            out, residuals = returned_values.check_residuals(executor.implementation.call(**given))
            found["logsumexp"] = returned_values.get_residual(residuals, "logsumexp")
            if "out" in names:
                found["out_saved"] = out
        return found

    return call, moving


def _push(call: Callable[[Arrays], Any], moving: Arrays, direction: Arrays) -> Any:
    """Return the tangents of the results of `call` at the operands `moving`."""
    return jax.jvp(call, (moving,), (direction,))[1]


def _walk(moving: Arrays, directions: Arrays, steps: Any) -> Arrays:
    """Return the operands after a step along each direction, in their dtypes."""
    return {name: x + jnp.tensordot(steps, directions[name], 1).astype(x.dtype) for name, x in moving.items()}
