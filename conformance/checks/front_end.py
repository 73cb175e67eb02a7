"""Check `front_end`: judge a model's front end and attention, compiled as one program, forward and backward.

The front end is the code of a model before attention. It applies rotary embedding, norms and factors to the raw
projections of queries, keys and values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from cases.front_ends import compute_positions
from cases.operand_values import DTYPES, Cotangent, draw_cotangent, draw_raw_projections
from conformance.check_api.judgement import Judgement
from conformance.check_api.subject import Subject
from conformance.executor_tasks import front_end_calls
from conformance.truth.front_end_oracle import FrontEnd
from conformance.truth.rounding_bounds import Expectation, OperandErrors, compute_expectation
from conformance.truth.roundoff import Roundoff
from conformance.truth.running_error import BoundedNumber

# The gradient whose limit applies to each raw operand.
_GRADIENT_OF_RAW = {"q": "dq", "k": "dk", "v": "dv", "q_norm": "dq", "k_norm": "dk"}


def check_front_end(subject: Subject) -> Iterator[Judgement]:
    """Check `out` and the gradients of raw projections and norm weights, through front end and attention.

    The expectation is a float64 front end followed by the float64 oracle. The bounds include two errors of the
    operands: the f32 arithmetic of the front end, and the rounding of its results to the operands' dtype.
    """
    raw, steps = draw_raw_projections(subject.case), subject.case.steps
    if not steps:
        return
    truth = FrontEnd.of(steps, raw)
    drawn = draw_cotangent(subject.case).out
    do = np.where(subject.judged_out, drawn, np.zeros_like(drawn))
    cotangents = (Cotangent("random", do),) if subject.has_gradients else ()
    expected = _compute_expectation(subject, truth, cotangents)
    out, gradients = _run_program(subject, do if cotangents else None)
    yield _judge(subject, "out", "out", out, expected.forward["out"], subject.judged_out)
    if not cotangents:
        return
    u = Roundoff.of(subject.implementation.arithmetic, subject.problem)
    gradient_bounds = expected.gradients[0]
    raw_bounds = truth.pull_back(gradient_bounds["dq"], gradient_bounds["dk"], gradient_bounds["dv"], u.out, u.tiny)
    for name, bounded in raw_bounds.items():
        yield _judge(subject, _GRADIENT_OF_RAW[name], f"d{name}_raw", gradients[name], bounded, None)


def _compute_expectation(subject: Subject, truth: FrontEnd, cotangents: tuple[Cotangent, ...]) -> Expectation:
    """Compute exact results of attention on the exact outputs of the front end, with bounds.

    The bounds include the errors that the outputs have once they are computed in f32 and stored in the case's dtype.
    """
    u = Roundoff.of(subject.implementation.arithmetic, subject.problem)
    q, k = (stream.after.stored(u.out, u.tiny) for stream in (truth.q, truth.k))
    v: BoundedNumber = truth.v
    return compute_expectation(
        dataclasses.replace(subject.problem, q=q.value, k=k.value, v=v.value),
        subject.implementation.arithmetic,
        cotangents,
        empty_rows=subject.empty_rows,
        inexact=OperandErrors(subject.case.dtype, q.error, k.error, v.error),
    )


def _run_program(subject: Subject, do: np.ndarray | None) -> tuple[Any, Mapping[str, Any]]:
    """Run one compiled program for `out` and, with a cotangent, the gradients of the front end's inputs."""
    raw, case = draw_raw_projections(subject.case), subject.case
    given = {name: x for name, x in dataclasses.asdict(raw).items() if x is not None}
    assert given["q"].dtype == DTYPES[case.dtype]
    places = compute_positions(case.q_length, case.kv_length)
    return subject.executor.run(front_end_calls.run_front_end, subject.problem, case.steps, given, places, do)


def _judge(subject: Subject, limit: str, label: str, got: Any, expected: Any, judged: np.ndarray | None) -> Judgement:
    return subject.judge(limit, np.asarray(got), expected, judged, label=label)
