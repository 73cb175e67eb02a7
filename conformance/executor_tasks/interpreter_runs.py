"""The task of the check `interpreter`: run the call under JAX's Pallas interpreter of its accelerator.

The interpreter runs on a CPU. It records races, and stops a kernel at an error such as an access out of bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from cases.operand_values import Cotangent, Problem
from conformance.accelerators.interpreters import build_parameters, capture_races, format_interpreter_error
from conformance.execution.executor import Executor, Result, Values
from conformance.execution.kernel_errors import is_refused_precision
from conformance.executor_tasks.program_inspection import describe_place, iter_operations

Program = Literal["forward", "residuals", "gradients", "gradients_lse"]
InterpreterRun = tuple[Program, Values, list[str], str, str]


def run_programs(
    executor: Executor, problem: Problem, seed: int, programs: Sequence[Program], cotangents: Mapping[str, Cotangent]
) -> list[InterpreterRun]:
    """Run programs with one seed of the interpreter, in order, and end after a program that the interpreter stops.

    `seed` determines the order in which the program instances of the kernel's grid run.

    Returns:
      For each program: its name, its results, the observed races, the message of the error that stopped it, or "", and
      why the interpreter cannot run it, or "".
    """
    accelerator = executor.implementation.accelerator
    assert accelerator.under_interpreter is not None
    interpreted = executor.with_call(accelerator.under_interpreter(build_parameters(seed, accelerator.platform)))
    runs = []
    for program in programs:
        values: Values = {}
        error_message = unfit = ""
        with capture_races() as observed:
            try:
                if accelerator.platform == "tpu":
                    unfit = _find_padded_block(interpreted, program, problem, cotangents.get(program))
                if not unfit:
                    values = _run_program(interpreted, program, problem, cotangents.get(program)).values
            except NotImplementedError:
                raise
            except Exception as error:  # the interpreter stops a kernel by errors of many types
                if is_refused_precision(error):
                    raise
                error_message = format_interpreter_error(error)
        runs.append((program, values, list(observed), error_message, unfit))
        if error_message:
            break
    return runs


def _find_padded_block(executor: Executor, program: Program, problem: Problem, cotangent: Cotangent | None) -> str:
    """Describe a block of a TPU kernel whose padding the interpreter ignores; "" if there is none.

    The interpreter reads and writes such blocks without their padding (jax 0.10.2 to 0.12): at another place, or out of
    bounds. The TPU and the fast interpreter honour it.
    """
    compiled, arrays = executor.compiled(problem)
    cotangents = () if cotangent is None else (cotangent.out, cotangent.logsumexp)[: 1 + (program == "gradients_lse")]
    # The call that follows finds this trace in JAX's cache.
    traced = getattr(compiled, program).trace(arrays, *cotangents)
    for operation in iter_operations([traced.jaxpr]):
        for block in getattr(operation.params.get("grid_mapping"), "block_mappings", ()):
            for size in block.block_shape:
                if any(padding := getattr(size, "padding", ())):
                    return (
                        f"JAX's interpreter ignores the padding {padding} of a pl.Element in the block of "
                        f"{block.origin}, so pad the operand instead to judge the kernel ({describe_place(operation)})"
                    )
    return ""


def _run_program(executor: Executor, program: Program, problem: Problem, cotangent: Cotangent | None) -> Result:
    """Run one program by the method of the executor with the same name."""
    if program == "forward":
        return executor.forward(problem)
    if program == "residuals":
        return executor.residuals(problem)
    assert cotangent is not None
    return (
        executor.gradients(problem, cotangent) if program == "gradients" else executor.gradients_lse(problem, cotangent)
    )
