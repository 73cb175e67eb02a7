"""The call under JAX's interpreter of its accelerator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from cases.operand_values import Cotangent, Problem
from conformance.accelerators.interpreters import build_parameters, capture_races, format_interpreter_error
from conformance.execution.executor import Executor, Result, Values

Program = Literal["forward", "residuals", "gradients", "gradients_lse"]
InterpreterRun = tuple[Program, Values, list[str], str]


def run_programs(
    executor: Executor, problem: Problem, seed: int, programs: Sequence[Program], cotangents: Mapping[str, Cotangent]
) -> list[InterpreterRun]:
    """Programs in the order of a seed, up to the first that the interpreter stops.

    Args:
      executor: of the implementation.
      problem: the operands.
      seed: of the order in which the grid is run.
      programs: the call, the call with residuals, gradients of one of them.
      cotangents: of the programs that are gradients.

    Returns:
      Of each program its name, what it gave, the races that were seen, and what stopped it, if anything.
    """
    accelerator = executor.implementation.accelerator
    assert accelerator.under_interpreter is not None
    other = executor.with_call(accelerator.under_interpreter(build_parameters(seed, accelerator.platform)))
    found = []
    for program in programs:
        values: Values = {}
        stopped = ""
        with capture_races() as raced:
            try:
                values = _run_program(other, program, problem, cotangents.get(program)).values
            except NotImplementedError:
                raise
            except Exception as error:  # the interpreter stops a kernel by errors of many types
                stopped = format_interpreter_error(error)
        found.append((program, values, list(raced), stopped))
        if stopped:
            break
    return found


def _run_program(executor: Executor, program: Program, problem: Problem, cotangent: Cotangent | None) -> Result:
    if program == "forward":
        return executor.forward(problem)
    if program == "residuals":
        return executor.residuals(problem)
    assert cotangent is not None
    return (
        executor.gradients(problem, cotangent) if program == "gradients" else executor.gradients_lse(problem, cotangent)
    )
