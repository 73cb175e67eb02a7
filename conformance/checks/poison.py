"""Values behind the mask never matter: NaN, infinity and huge numbers in keys that no query may attend to.

The compiled functions and the expectation are those of the clean case: nothing may change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from conformance.checks.forward import judge_out, judge_residual
from conformance.checks.gradients import judge_gradients
from conformance.checks.judgement import Judgement, unsupported
from conformance.contract import RESIDUALS
from conformance.subject import Subject

# Large enough to swamp anything, small enough that a dot product of it with ordinary values stays finite in the dtype.
_HUGE = {"f32": 2.0**40, "bf16": 2.0**40, "f16": 2.0**8}


def poison(subject: Subject) -> Iterator[Judgement]:
    """Poison in dead keys and values reaches neither outputs nor residuals nor gradients."""
    if not subject.problem.dead_keys.any():
        return
    for name, value in (("nan", np.nan), ("inf", np.inf), ("huge", _HUGE[subject.case.dtype])):
        if subject.implementation.behind_mask == "finite" and not np.isfinite(value):
            yield unsupported(name, "keys and values behind the mask are declared to be finite")
            continue
        yield from _poisoned(subject, name, value)


def _poisoned(subject: Subject, name: str, value: float) -> Iterator[Judgement]:
    clean = subject.problem
    problem = dataclasses.replace(
        clean,
        k=np.where(clean.unread_keys[..., None], np.asarray(value, clean.k.dtype), clean.k),
        v=np.where(clean.dead_keys[..., None], np.asarray(value, clean.v.dtype), clean.v),
    )
    # Rows that average all of v see the poison rightly; they are left out, and get no cotangent.
    rows = subject.judged_residuals & ~(clean.empty_rows & (subject.implementation.empty_rows == "mean"))
    judged_out = rows.transpose(0, 2, 1)[..., None]
    found: list[Judgement] = []
    if subject.implementation.residuals:
        result = subject.residuals_of(problem)
        found.append(judge_out(subject, result, judged=judged_out))
        found += [
            judge_residual(subject, residual, result, judged=rows)
            for residual in RESIDUALS
            if residual in subject.implementation.residuals
        ]
    else:
        found.append(judge_out(subject, subject.executor.forward(problem), judged=judged_out))
    if subject.with_gradients and not (subject.implementation.empty_rows == "mean" and clean.empty_rows.any()):
        cotangent = subject.any_random
        result = subject.gradients_of(problem, subject.cotangents[cotangent])
        found += list(judge_gradients(subject, result, subject.expected_gradients(cotangent)))
    for judgement in found:
        yield dataclasses.replace(judgement, observable=f"{judgement.observable}.{name}")
