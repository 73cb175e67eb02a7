"""Compiling: an accelerator's kernel goes through its real compiler, for each generation, without the accelerator."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from conformance import records
from conformance.accelerators.compilation import CompileError, NoCompiler, Refused, compile_for
from conformance.accelerators.targets import CompileTarget, targets_of
from conformance.asking.judgement import Judgement, unsupported
from conformance.asking.subject import Subject
from conformance.calling.execution import Executor

Programs = dict[str, tuple[Any, tuple[Any, ...]]]


def compiles(subject: Subject) -> Iterator[Judgement]:
    """The call, with residuals and with gradients too, compiles for each generation of its accelerator.

    Where a compiler takes seconds a program, only the plainest and the fullest of these programs are compiled.
    """
    implementation = subject.implementation
    if implementation.accelerator.native is None:
        yield _unjudged("all", "the implementation declares no `native` call, which its accelerator's compiler takes")
        return
    targets = targets_of(implementation.accelerator.platform)
    if missing := {reason for target in targets if (reason := target.toolchain.missing)}:
        yield _unjudged("all", "; ".join(sorted(missing)))
        return
    programs = _programs(subject)
    if any(target.toolchain.slow for target in targets):
        first, last = next(iter(programs)), next(reversed(programs))
        programs = {name: programs[name] for name in dict.fromkeys((first, last))}
    for target in targets:
        for name, (function, operands) in programs.items():
            yield _compiled(target, name, function, operands)


def _programs(subject: Subject) -> Programs:
    """What is compiled, by name, each with its operands: plain, with residuals, and with the backward pass of each.

    The plainest comes first, the one that holds most of the others last.
    """
    implementation, case = subject.implementation, subject.case
    assert implementation.accelerator.native is not None
    executor = Executor(dataclasses.replace(implementation, call=implementation.accelerator.native))
    compiled, arrays = executor.compiled(subject.problem)
    found: Programs = {"forward": (compiled.forward, (arrays,))}
    if implementation.residuals:
        found["residuals"] = (compiled.residuals, (arrays,))
    if not subject.with_gradients:
        return found
    rows = (case.batch, case.q_length, case.num_q_heads)
    do = _shape((*rows, case.v_head_dim), subject.problem.q.dtype)
    found["gradients"] = (compiled.gradients, (arrays, do))
    if "logsumexp" in implementation.differentiable_residuals:
        dlse = _shape((case.batch, case.num_q_heads, case.q_length), jnp.float32)
        found["gradients_lse"] = (compiled.gradients_lse, (arrays, do, dlse))
    return found


def _shape(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call] # untyped upstream


def _compiled(target: CompileTarget, name: str, function: Any, operands: tuple[Any, ...]) -> Judgement:
    observable = f"{target.name}.{name}"
    try:
        figures = compile_for(target, function, operands)
    except NoCompiler as error:
        return _unjudged(observable, str(error))
    except Refused as error:
        return unsupported(observable, str(error))
    except CompileError as error:
        return Judgement(observable=observable, verdict=records.FAIL, reason=str(error))
    return Judgement(observable=observable, verdict=records.PASS, figures=figures)


def _unjudged(observable: str, reason: str) -> Judgement:
    return Judgement(observable=observable, verdict=records.UNJUDGED, reason=reason)
