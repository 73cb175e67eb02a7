"""The call through the real compiler of its accelerator."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from cases.inputs import Problem
from conformance.accelerators.compilation import CompileError, NoCompiler, Refused, compile_for
from conformance.accelerators.targets import CompileTarget, targets_of
from conformance.calling.execution import Executor

Programs = dict[str, tuple[Any, tuple[Any, ...]]]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a compiler made of one program.

    Attributes:
      target: the generation of the accelerator.
      program: its name.
      outcome: `"compiled"`, `"failed"`, `"refused"`, or `"no compiler"`.
      reason: why, if it is not compiled.
      figures: sizes and times, if it is.
    """

    target: str
    program: str
    outcome: str
    reason: str = ""
    figures: Mapping[str, float] = dataclasses.field(default_factory=dict)


def natively(executor: Executor, problem: Problem, *, gradients: bool) -> list[dict[str, Any]]:
    """The call, with residuals and with gradients too, compiled for each generation: the fields of `Compiled`.

    Where a compiler takes seconds a program, only the plainest and the fullest of these programs are compiled.
    """
    targets = targets_of(executor.implementation.accelerator.platform)
    programs = _programs(executor.native, problem, gradients=gradients)
    if any(target.toolchain.slow for target in targets):
        first, last = next(iter(programs)), next(reversed(programs))
        programs = {name: programs[name] for name in dict.fromkeys((first, last))}
    pairs = [(target, name) for target in targets for name in programs]
    return [dataclasses.asdict(_compiled(target, name, *programs[name])) for target, name in pairs]


def fullest(executor: Executor, problem: Problem, target: CompileTarget, *, gradients: bool) -> Compiled:
    """The call compiled for one generation, with its gradients if they are asked for."""
    programs = _programs(executor.native, problem, gradients=gradients)
    name = "gradients" if gradients else "forward"
    return _compiled(target, name, *programs[name])


def _programs(executor: Executor, problem: Problem, *, gradients: bool) -> Programs:
    """What is compiled, by name, each with its operands: plain, with residuals, and with the backward pass of each.

    The plainest comes first, the one that holds most of the others last.
    """
    implementation = executor.implementation
    compiled, arrays = executor.compiled(problem)
    found: Programs = {"forward": (compiled.forward, (arrays,))}
    if implementation.residuals:
        found["residuals"] = (compiled.residuals, (arrays,))
    if not gradients:
        return found
    batch, q_length, num_q_heads, _ = problem.q.shape
    do = _shape((batch, q_length, num_q_heads, problem.v.shape[-1]), problem.q.dtype)
    found["gradients"] = (compiled.gradients, (arrays, do))
    if "logsumexp" in implementation.differentiable_residuals:
        dlse = _shape((batch, num_q_heads, q_length), jnp.float32)
        found["gradients_lse"] = (compiled.gradients_lse, (arrays, do, dlse))
    return found


def _shape(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call] # untyped upstream


def _compiled(target: CompileTarget, name: str, function: Any, operands: tuple[Any, ...]) -> Compiled:
    try:
        return Compiled(target.name, name, "compiled", figures=compile_for(target, function, operands))
    except NoCompiler as error:
        return Compiled(target.name, name, "no compiler", str(error))
    except Refused as error:
        return Compiled(target.name, name, "refused", str(error))
    except CompileError as error:
        return Compiled(target.name, name, "failed", str(error))
