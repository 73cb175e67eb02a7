"""Check `interpreter`: run a kernel under JAX's Pallas interpreter of its accelerator, and judge results and races.

The interpreter shows races, reads of uninitialised memory and accesses out of bounds. Right results alone do not
exclude these. Each seed gives another order in which the kernel's program instances run.
"""

from __future__ import annotations

from collections.abc import Iterator

from cases.operand_registry import RESIDUALS
from conformance.accelerators.interpreters import list_seeds
from conformance.check_api.judgement import Judgement, add_label
from conformance.check_api.subject import Subject
from conformance.checks.forward import judge_out, judge_residual
from conformance.checks.gradients import judge_gradients
from conformance.execution.executor import Result
from conformance.executor_tasks import interpreter_runs
from reports import records

# The number of seeds for which the backward pass is run.
_BACKWARD_SEEDS = 2
# The name of the cotangent for each program that computes gradients.
_COTANGENT_OF = {"gradients": "random", "gradients_lse": "random_lse"}


def check_interpreter(subject: Subject) -> Iterator[Judgement]:
    """Check results and races under the accelerator's interpreter, with NaN in uninitialised memory."""
    accelerator = subject.implementation.accelerator
    if accelerator.under_interpreter is None:
        reason = "the implementation declares no `under_interpreter`, which builds the call for an interpreter"
        yield Judgement(observable="all", verdict=records.UNJUDGED, reason=reason)
        return
    raced: dict[str, list[str]] = {}
    cotangents = {
        program: subject.cotangents[name] for program, name in _COTANGENT_OF.items() if name in subject.cotangents
    }
    for seed in list_seeds(accelerator.platform):
        programs = _list_programs(subject, seed)
        for name, values, races, stopped, unfit in subject.executor.run(
            interpreter_runs.run_programs,
            subject.problem,
            seed,
            programs,
            {p: x for p, x in cotangents.items() if p in programs},
        ):
            if unfit:
                yield Judgement(observable=f"{name}.seed{seed}", verdict=records.UNJUDGED, reason=unfit)
                continue
            raced.setdefault(name, []).extend(races)
            if stopped:
                yield Judgement(observable=f"{name}.seed{seed}", verdict=records.FAIL, reason=stopped)
                yield from _judge_races(raced)
                return
            yield from add_label(f"seed{seed}", _judge_program(subject, name, Result(values)))
    yield from _judge_races(raced)


def _list_programs(subject: Subject, seed: int) -> list[interpreter_runs.Program]:
    """List the programs to run with a seed; only seeds 0 and 1 run the backward pass, only 0 the call with residuals.

    Programs are left out to save time. A backward pass is three kernels, and includes the call with residuals. A GPU
    program takes seconds. So on a GPU the call without residuals is left out if there is one with residuals.
    """
    residuals = subject.implementation.residuals
    leave_out = subject.implementation.accelerator.platform == "gpu" and residuals
    programs: list[interpreter_runs.Program] = [] if leave_out else ["forward"]
    if seed == 0 and residuals:
        programs.append("residuals")
    if seed >= _BACKWARD_SEEDS:
        return programs
    if "random_lse" in subject.cotangents:
        programs.append("gradients_lse")
    elif "random" in subject.cotangents:
        programs.append("gradients")
    return programs


def _judge_program(subject: Subject, name: str, result: Result) -> Iterator[Judgement]:
    """Judge the results of one program, `name`, by the oracle."""
    labels = {"residuals": "out_with_residuals", "gradients": "primal", "gradients_lse": "primal"}
    yield judge_out(subject, result, label=labels.get(name, "out"))
    if name == "residuals":
        for residual in RESIDUALS:
            if residual in subject.implementation.residuals:
                yield judge_residual(subject, residual, result)
    cotangent = _COTANGENT_OF.get(name)
    if cotangent is not None:
        yield from judge_gradients(subject, result, subject.get_expected_gradients(cotangent))


def _judge_races(raced: dict[str, list[str]]) -> Iterator[Judgement]:
    """Judge each program by the races that the interpreter reported; `raced` has their descriptions by program."""
    for name, found in raced.items():
        reason = f"{len(found)} races, the first: {found[0]}" if found else ""
        yield Judgement(observable=f"races.{name}", verdict=records.FAIL if found else records.PASS, reason=reason)
