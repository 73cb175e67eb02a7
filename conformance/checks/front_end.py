"""A model's front end and attention together: from raw projections to `out`, and all the way back."""

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

# The gradient that each raw operand comes from; its limit applies.
_GRADIENT_OF_RAW = {"q": "dq", "k": "dk", "v": "dv", "q_norm": "dq", "k_norm": "dk"}


def check_front_end(subject: Subject) -> Iterator[Judgement]:
    """`out` and the gradients of raw projections and norm weights, through rotary, norms and factors and attention.

    The truth is the float64 front end followed by the float64 oracle. A front end in f32 may be off, and its results
    are rounded to the operands' dtype. Both enter the bounds as an error of the operands.
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
    found = expected.gradients[0]
    through = truth.pull_back(found["dq"], found["dk"], found["dv"], u.out, u.tiny)
    for name, bounded in through.items():
        yield _judge(subject, _GRADIENT_OF_RAW[name], f"d{name}_raw", gradients[name], bounded, None)


def _compute_expectation(subject: Subject, truth: FrontEnd, cotangents: tuple[Cotangent, ...]) -> Expectation:
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
    """`out` and, for a cotangent, the gradients of what the front end takes: one compiled program."""
    raw, case = draw_raw_projections(subject.case), subject.case
    given = {name: x for name, x in dataclasses.asdict(raw).items() if x is not None}
    assert given["q"].dtype == DTYPES[case.dtype]
    places = compute_positions(case.q_length, case.kv_length)
    return subject.executor.run(front_end_calls.run_front_end, subject.problem, case.steps, given, places, do)


def _judge(subject: Subject, limit: str, label: str, got: Any, expected: Any, judged: np.ndarray | None) -> Judgement:
    return subject.judge(limit, np.asarray(got), expected, judged, label=label)
