"""Tasks that compile the call with the real compiler of its accelerator (TPU or GPU), without the accelerator.

The check `compiles` uses `compile_programs`. Static cost estimates use `compile_largest_program`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cases.case import Case
from cases.operand_values import Problem, build_hollow_problem, draw_problem
from conformance.accelerators.compilation import CallRefused, CompileError, NoCompiler, compile_for
from conformance.accelerators.targets import CompileTarget, list_targets
from conformance.execution.executor import Arrays, Executor
from conformance.execution.executor import CompiledCalls as Entries
from conformance.execution.stored_calls import DENSE_ARGUMENTS, StoredCall

Programs = dict[str, tuple[Any, tuple[Any, ...]]]


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """The outcome of compiling one program."""

    target: str
    program: str  # the name of the program, such as `"gradients"`
    outcome: str  # `"compiled"`, `"failed"`, `"refused"`, or `"no compiler"`
    reason: str = ""
    # Sizes and times that the compiler reports, by name; empty if the program was not compiled.
    figures: Mapping[str, float] = dataclasses.field(default_factory=dict)


def build_problem(case: Case) -> Problem:
    """Build the problem of a case to be compiled; stored operands have shapes but no values, since caches are large."""
    return draw_problem(case) if case.storage is None else build_hollow_problem(case)


def compile_programs(executor: Executor, case: Case, *, gradients: bool) -> list[dict[str, Any]]:
    """Compile all programs of the call for each generation of its accelerator.

    If the compiler is slow and takes seconds for a program, only the plainest and the largest program are compiled.

    Returns:
      The fields of `CompiledProgram`, for each program of each generation.
    """
    targets = list_targets(executor.implementation.accelerator.platform)
    problem = build_problem(case)
    programs = _build_programs(executor.native, problem, gradients=gradients)
    if any(target.toolchain.slow for target in targets):
        first, last = next(iter(programs)), next(reversed(programs))
        programs = {name: programs[name] for name in dict.fromkeys((first, last))}
    pairs = [(target, name) for target in targets for name in programs]
    return [
        dataclasses.asdict(_compile_program(target, name, *programs[name], _get_depths(problem)))
        for target, name in pairs
    ]


def compile_largest_program(
    executor: Executor, problem: Problem, target: CompileTarget, *, gradients: bool
) -> CompiledProgram:
    """Compile the call for one generation; with `gradients`, the forward and backward pass.

    Operands that decide which blocks a kernel visits become constants of the program. They are the tables of a stored
    call, and lengths and positions that a mask is lowered to. So an estimate from the compiled code knows which path
    the kernel takes.
    """
    programs = _build_programs(executor.native, problem, gradients=gradients)
    name = "gradients" if gradients else "forward"
    function, (arrays, *cotangents) = programs[name]
    steering = _find_steering_operands(executor, problem)
    others = {key: x for key, x in arrays.items() if key not in steering}
    specialized = jax.jit(lambda arrays, *rest: function({**arrays, **steering}, *rest)) if steering else function
    return _compile_program(target, name, specialized, (others, *cotangents), _get_depths(problem))


def _find_steering_operands(executor: Executor, problem: Problem) -> dict[str, np.ndarray]:
    """Return the operands that decide which blocks a kernel visits: arrays with a number per sequence or page."""
    call, (_, arrays) = executor.implementation.call, executor.arguments(problem)
    if isinstance(call, StoredCall) and problem.storage is not None:
        return {key: np.asarray(x) for key, x in call.select_tables(arrays["storage"]).items()}
    sizes = (*problem.q.shape[:1], problem.q.shape[2], problem.q.shape[1], problem.k.shape[1])
    _, mask_arrays = executor.implementation.lower_mask(problem.mask, *sizes)
    return {key: np.asarray(x) for key, x in mask_arrays.items() if isinstance(x, np.ndarray) and x.ndim == 1}


def _build_programs(executor: Executor, problem: Problem, *, gradients: bool) -> Programs:
    """Build the programs to compile by name, each with its operands.

    The programs are the call without residuals, the call with residuals, and the backward pass of each. The plainest
    program comes first. The last one includes the largest part of the others.
    """
    implementation = executor.implementation
    compiled, arrays = executor.compiled(problem) if problem.storage is None else _build_stored_call(executor, problem)
    programs: Programs = {"forward": (compiled.forward, (arrays,))}
    if implementation.has_residual_call:
        programs["residuals"] = (compiled.residuals, (arrays,))
    if not gradients:
        return programs
    *rows, num_q_heads, _ = arrays["q"].shape  # [B, T], or [total_q]
    do = _build_shape((*rows, num_q_heads, problem.v.shape[-1]), problem.q.dtype)
    programs["gradients"] = (compiled.gradients, (arrays, do))
    if "logsumexp" in implementation.differentiable_residuals:
        dlse = _build_shape(
            (*rows[:-1], num_q_heads, rows[-1]) if problem.storage is None else (*rows, num_q_heads), jnp.float32
        )
        programs["gradients_lse"] = (compiled.gradients_lse, (arrays, do, dlse))
    return programs


def _build_stored_call(executor: Executor, problem: Problem) -> tuple[Entries, Arrays]:
    """Return a stored call's entry points, without conversions of dense operands, and the shapes of its operands."""
    call = executor.implementation.call
    assert isinstance(call, StoredCall)
    statics, arrays = executor.arguments(problem)
    dense = {name: arrays[name] for name in DENSE_ARGUMENTS if name in arrays}
    others = {name: x for name, x in arrays.items() if name not in dense}
    store = functools.partial(call.store, q_scale=statics.get("q_scale"))
    call_by_keyword = call.bind_depth(problem.v.shape[-1])
    plain = dataclasses.replace(executor.implementation, call=call_by_keyword, storage=None, writes_pages=False)
    return Executor(plain).compiled(problem)[0], {**jax.eval_shape(store, **dense), **others}


def _build_shape(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _get_depths(problem: Problem) -> tuple[int, int]:
    return problem.q.shape[-1], problem.v.shape[-1]


def _compile_program(
    target: CompileTarget, name: str, function: Any, operands: tuple[Any, ...], depths: tuple[int, int]
) -> CompiledProgram:
    """Compile one program for one generation, and turn a compiler's exception into an outcome with a reason."""
    try:
        return CompiledProgram(target.name, name, "compiled", figures=compile_for(target, function, operands, depths))
    except NoCompiler as error:
        return CompiledProgram(target.name, name, "no compiler", str(error))
    except CallRefused as error:
        return CompiledProgram(target.name, name, "refused", str(error))
    except CompileError as error:
        return CompiledProgram(target.name, name, "failed", str(error))
