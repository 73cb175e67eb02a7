"""Sharding: under `shard_map` over batch, heads and query sequence, the call and its gradients mean the same.

And on arrays whose shardings are part of their types, and where `shard_map` checks over which axes values differ.

Four devices are needed; on CPU they are virtual (`conformance.environment` asks XLA for them). Queries are sharded in
the load-balanced order of context parallelism (docs/contract.md, section 3), each device masking with its own rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, get_args

import numpy as np

from cases.case import Case, CaseIdError
from cases.inputs import Cotangent, Problem, draw, draw_cotangent
from cases.operands import GRADIENT_OF, OPTIONAL
from conformance import records
from conformance.asking.judgement import Judgement, apart, unsupported
from conformance.asking.subject import Subject
from conformance.calling.execution import Values
from conformance.driving import sharded
from conformance.driving.sharded import DEVICES


def sharding(subject: Subject) -> Iterator[Judgement]:
    """Under `shard_map` on four devices, over batch, heads and queries, and on explicit axes, results are right."""
    if (kind := subject.implementation.storage) is not None:
        yield unsupported("all", f"{kind} sequences have no axis of batch rows or queries to share between devices")
        return
    if (count := subject.executor.devices) < DEVICES:
        reason = (
            f"{DEVICES} devices are needed, there are {count}; on CPU, XLA_FLAGS must have "
            f"--xla_force_host_platform_device_count={DEVICES} (it is set unless XLA_FLAGS is set already)"
        )
        yield Judgement(observable="all", verdict=records.UNJUDGED, reason=reason)
        return
    for name in get_args(sharded.Over):
        try:
            case = _divisible(subject.case)
            case = _balanced(case) if name == "sequence" else _without_functions(case)
        except CaseIdError as error:
            yield unsupported(name, f"this case cannot be shared by {DEVICES} devices: {error}")
            continue
        yield from apart(name, functools.partial(_judge, subject, case, name))
    for name, judge in (("explicit", _judge_explicit), ("checked", _judge_checked)):
        yield from apart(name, functools.partial(_unless_refused, subject, judge))


def _unless_refused(subject: Subject, judge: Callable[[Subject, Case], Iterator[Judgement]]) -> Iterator[Judgement]:
    """What `judge` finds. What JAX refuses is a finding only of those who declare that they `validate`.

    A function in plain JAX has to say how some results are sharded, or where a loop's carry differs, and JAX names the
    operation: that it does not is no wrong result, and its author may never have meant it.
    """
    try:
        case = _divisible(subject.case)
    except CaseIdError as error:
        yield unsupported("all", f"this case cannot be shared by {DEVICES} devices: {error}")
        return
    if (reason := _declined(subject, case)) is not None:
        yield unsupported("all", reason)
        return
    try:
        yield from judge(subject, case)
    except NotImplementedError:
        raise
    except Exception as error:  # whatever JAX raises
        if subject.implementation.validates:
            raise
        yield unsupported("all", f"{type(error).__name__}: {error}".split("\n")[0])


def _judge_explicit(subject: Subject, case: Case) -> Iterator[Judgement]:
    """Batch rows on a mesh of explicit axes, as `jax.make_mesh` makes it from jax 0.12 on, with no `shard_map`."""
    problem = draw(case)
    do, judged = _cotangent(subject, case, problem)
    out, gradients = subject.executor.run(sharded.explicit, problem, do if subject.with_gradients else None)
    yield from _judge_results(subject, problem, do, judged, out, gradients)


def _judge_checked(subject: Subject, case: Case) -> Iterator[Judgement]:
    """`shard_map` as it is by default, `check_vma=True`; traced only, since its results are those without the check."""
    if subject.implementation.accelerator.interpreted:
        yield unsupported("all", "JAX's interpreters of Pallas kernels do not say over which axes values differ")
        return
    do = draw_cotangent(case).out if subject.with_gradients else None
    subject.executor.run(sharded.checked, draw(case), do)
    yield Judgement(observable="traced", verdict=records.PASS)


def _cotangent(subject: Subject, case: Case, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """A cotangent of `out`, zero where rows are not judged, and which are."""
    judged, drawn = subject.judged_out_of(problem), draw_cotangent(case).out
    return np.where(judged, drawn, np.zeros_like(drawn)), judged


def _divisible(case: Case) -> Case:
    """The case with a batch and key/value heads that four devices can share."""
    group = case.num_q_heads // case.num_kv_heads
    return dataclasses.replace(case, batch=DEVICES, num_kv_heads=DEVICES, num_q_heads=DEVICES * group)


def _without_functions(case: Case) -> Case:
    """Without functions of batch row and query head: a device does not know which of them are its own."""
    absent: dict[str, Any] = {operand.field: operand.absent for operand in OPTIONAL if operand.is_function}
    return dataclasses.replace(case, **absent)


def _balanced(case: Case) -> Case:
    """Without operands that go by where queries stand: a device does not know where its own do."""
    absent: dict[str, Any] = {operand.field: operand.absent for operand in OPTIONAL if operand.placed}
    return dataclasses.replace(case, mask=f"balanced-{DEVICES}", **absent)


def _judge(subject: Subject, case: Case, axis: sharded.Over) -> Iterator[Judgement]:
    if (reason := _declined(subject, case)) is not None:
        yield unsupported("all", reason)
        return
    problem = draw(case)
    do, judged = _cotangent(subject, case, problem)
    out, gradients = subject.executor.run(sharded.over, axis, problem, do if subject.with_gradients else None)
    yield from _judge_results(subject, problem, do, judged, out, gradients)


def _judge_results(
    subject: Subject, problem: Problem, do: np.ndarray, judged: np.ndarray, out: Any, gradients: Values
) -> Iterator[Judgement]:
    cotangents = (Cotangent("random", do),) if subject.with_gradients else ()
    expected = subject.expect(problem, cotangents)
    yield _compared(subject, "out", out, expected.forward["out"], judged)
    for operand, name in GRADIENT_OF.items():
        if operand in gradients and name in subject.implementation.gradients:
            yield _compared(subject, name, gradients[operand], expected.gradients[0][name], None)


def _declined(subject: Subject, case: Case) -> str | None:
    supports = subject.implementation.supports
    if (reason := supports(case)) is not None or not case.mask.startswith("balanced"):
        return reason
    return supports(dataclasses.replace(case, mask="dense-d40"))


def _compared(subject: Subject, name: str, got: Any, expected: Any, judged: np.ndarray | None) -> Judgement:
    return subject.judge(name, np.asarray(got), expected, judged)
