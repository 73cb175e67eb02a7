"""Interpreters of accelerators: what a kernel reads, writes and leaves to chance, beyond what its results show."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from cases.operands import RESIDUALS
from conformance import records
from conformance.accelerators.interpreters import parameters, races, seeds, what_it_raised
from conformance.asking.judgement import Judgement, labelled
from conformance.asking.subject import Subject
from conformance.calling.execution import Executor, Result
from conformance.checks.forward import judge_out, judge_residual
from conformance.checks.gradients import judge_gradients

_BACKWARD_SEEDS = 2


def interpreter(subject: Subject) -> Iterator[Judgement]:
    """Under its accelerator's interpreter, with NaN in fresh memory and in any order, it is right and nothing races."""
    accelerator = subject.implementation.accelerator
    make, platform = accelerator.under_interpreter, accelerator.platform
    if make is None:
        reason = "the implementation declares no `under_interpreter`, the call with given interpreter parameters"
        yield Judgement(observable="all", verdict=records.UNJUDGED, reason=reason)
        return
    raced: dict[str, list[str]] = {}
    for seed in seeds(platform):
        interpreted = dataclasses.replace(subject.implementation, call=make(parameters(seed, platform)))
        executor = Executor(interpreted, subject.executor.options)
        for name, program in _programs(subject, executor, seed).items():
            stopped = ""
            with races() as found:
                try:
                    result = program()
                except NotImplementedError:
                    raise
                except Exception as error:  # the interpreter stops a kernel by errors of many types
                    stopped = what_it_raised(error)
            raced.setdefault(name, []).extend(found)
            if stopped:
                yield Judgement(observable=f"{name}.seed{seed}", verdict=records.FAIL, reason=stopped)
                yield from _race_judgements(raced)
                return
            yield from labelled(f"seed{seed}", _judge(subject, name, result))
    yield from _race_judgements(raced)


def _programs(subject: Subject, executor: Executor, seed: int) -> dict[str, Callable[[], Result]]:
    """What is run, by name: the call with every seed, its backward pass with two, the call with residuals with one.

    The numbers of seeds follow from the costs. A backward pass is three kernels, and runs the call with residuals as
    one of them. On a GPU a program takes seconds, so the call without residuals is left out.
    """
    problem, cotangents = subject.problem, subject.cotangents
    residuals = subject.implementation.residuals
    leave_out = subject.implementation.accelerator.platform == "gpu" and residuals
    found = {} if leave_out else {"forward": lambda: executor.forward(problem)}
    if seed == 0 and residuals:
        found["residuals"] = lambda: executor.residuals(problem)
    if seed >= _BACKWARD_SEEDS:
        return found
    if "random_lse" in cotangents:
        found["gradients_lse"] = lambda: executor.gradients_lse(problem, cotangents["random_lse"])
    elif "random" in cotangents:
        found["gradients"] = lambda: executor.gradients(problem, cotangents["random"])
    return found


def _judge(subject: Subject, name: str, result: Result) -> Iterator[Judgement]:
    labels = {"residuals": "out_with_residuals", "gradients": "primal", "gradients_lse": "primal"}
    yield judge_out(subject, result, label=labels.get(name, "out"))
    if name == "residuals":
        for residual in RESIDUALS:
            if residual in subject.implementation.residuals:
                yield judge_residual(subject, residual, result)
    cotangent = {"gradients": "random", "gradients_lse": "random_lse"}.get(name)
    if cotangent is not None:
        yield from judge_gradients(subject, result, subject.expected_gradients(cotangent))


def _race_judgements(raced: dict[str, list[str]]) -> Iterator[Judgement]:
    for name, found in raced.items():
        reason = f"{len(found)} races, the first: {found[0]}" if found else ""
        yield Judgement(observable=f"races.{name}", verdict=records.FAIL if found else records.PASS, reason=reason)
