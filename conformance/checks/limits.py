"""Limits: a soft cap that goes to infinity is no cap, a sink to minus infinity no sink, a sink to infinity no keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from cases.inputs import Problem
from conformance.asking.judgement import Judgement
from conformance.asking.subject import Subject
from conformance.truth.bounds import Bounded

# Far above any logit: it bends them by less than their rounding.
_HIGH_CAP = 2.0**20
# Its exponential is zero, like that of minus infinity. Sinks that are switched off are written so: finite.
_LOW_SINK = -1e30
# Above the largest logit by more than exp can bear in f32.
_HIGH_SINK = 150.0


def limits(subject: Subject) -> Iterator[Judgement]:
    """With a soft cap of 2**20, or sinks of -1e30 or -inf, results are those without; high sinks take all weight."""
    problem = subject.problem
    if problem.soft_cap is not None:
        high = dataclasses.replace(problem, soft_cap=_HIGH_CAP)
        yield from _same(subject, "high_soft_cap", high, problem.without("soft_cap"))
    if problem.sinks is not None:
        low = dataclasses.replace(problem, sinks=np.full_like(problem.sinks, _LOW_SINK))
        yield from _same(subject, "low_sinks", low, problem.without("sinks"))
        none = dataclasses.replace(problem, sinks=np.full_like(problem.sinks, -np.inf))
        yield from _same(subject, "no_sinks", none, problem.without("sinks"))
        yield from _high_sinks(subject)


def _high_sinks(subject: Subject) -> Iterator[Judgement]:
    """Sinks that take all the weight: `exp(logit - sink)` underflows, `exp(sink - logit)` would overflow."""
    problem = subject.problem
    top = subject.expectation.forward["max_logits"].value
    lift = float(np.max(top, where=np.isfinite(top), initial=0.0)) + _HIGH_SINK
    assert problem.sinks is not None
    high = dataclasses.replace(problem, sinks=np.full_like(problem.sinks, lift))
    expected = subject.expect(high).forward
    for name, got in subject.results_of(high).items():
        judged = subject.judged_out_of(high) if name == "out" else subject.judged_residuals
        yield subject.judge(name, got, expected[name], judged, label=f"{name}.high_sinks")


def _same(subject: Subject, what: str, limit: Problem, without: Problem) -> Iterator[Judgement]:
    """The two answers may differ by both their bounds, and by what they differ in exact arithmetic."""
    got, plain = subject.results_of(limit), subject.results_of(without)
    expected, expected_plain = (subject.expect(problem).forward for problem in (limit, without))
    for name in got:
        one, other = expected[name], expected_plain[name]
        with np.errstate(invalid="ignore"):
            bound = one.bound + other.bound + np.nan_to_num(np.abs(one.value - other.value))
        live = ~without.empty_rows
        judged = live.transpose(0, 2, 1)[..., None] if name == "out" else live
        agreeing = Bounded(plain[name].astype(np.float64), bound)
        yield subject.judge(name, got[name], agreeing, judged, label=f"{name}.{what}")
