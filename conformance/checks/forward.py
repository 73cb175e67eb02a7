"""Checks `forward`, `residuals` and `primal`: judge the results of the forward pass by the oracle.

The forward pass has three calls: without residuals, with residuals, and as part of `jax.vjp`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from cases.operand_registry import FURTHER_RESULTS, RESIDUALS
from cases.operand_values import Problem
from conformance.check_api.judgement import Judgement, build_unsupported
from conformance.check_api.subject import Subject
from conformance.checks import page_comparison
from conformance.execution import returned_values
from conformance.execution.executor import Result
from conformance.truth.comparison import compare
from conformance.truth.rounding_bounds import Expectation


def check_forward(subject: Subject) -> Iterator[Judgement]:
    """Check `out` of the call without residuals, and its shape and dtype.

    With a quantised cache, `out` is judged by attention to the values that the cache represents. The record also has
    the ratio of `out` to attention over the keys and values before quantisation (`ratio_before_storing`). The bound of
    that ratio includes rounding and quantisation. It does not decide the verdict.

    If the call writes pages, `k_pages` and `v_pages` are compared bit for bit. If it takes `update_kv_cache`, so are
    those of a call in which that is False, and `out` is judged there too.
    """
    judgement = judge_out(subject, subject.forward)
    if (before := subject.expectation_before_storing) is not None:
        comparison = compare(subject.forward.values["out"], before.forward["out"], subject.judged_out)
        judgement = dataclasses.replace(judgement, figures={"ratio_before_storing": comparison.ratio})
    yield judgement
    if subject.implementation.writes_pages:
        yield from page_comparison.check_pages(subject, save_residuals=False)
        yield from page_comparison.check_pages_without_update(subject, save_residuals=False)


def check_residuals(subject: Subject) -> Iterator[Judgement]:
    """Check `out`, `logsumexp`, `max_logits` and further results of the call with `save_residuals=True`."""
    offered = subject.implementation.residuals
    for name in RESIDUALS:
        if name not in offered:
            yield build_unsupported(name, f"{name} is not offered")
    if not subject.implementation.has_residual_call:
        return
    result = subject.residuals
    yield judge_out(subject, result)
    for name in RESIDUALS:
        if name in offered:
            yield judge_residual(subject, name, result)
    yield from judge_further(subject, subject.problem, subject.expectation, result.further)
    if subject.implementation.writes_pages:
        yield from page_comparison.check_pages(subject, save_residuals=True)
        yield from page_comparison.check_pages_without_update(subject, save_residuals=True)


def judge_further(
    subject: Subject, problem: Problem, expectation: Expectation, got: Mapping[str, np.ndarray]
) -> Iterator[Judgement]:
    """Judge each further result that the implementation offers, and its dtype, on a problem of the case's shapes."""
    for name in (name for name in FURTHER_RESULTS if name in subject.implementation.further_results):
        if name not in got:
            yield subject.judge_malformed(name, returned_values.describe_residuals(got, f"without {name!r}"))
        else:
            judged = subject.find_judged_further(name, problem)
            yield subject.judge_residual(name, got[name], expectation.forward[name], judged)


def check_primal(subject: Subject) -> Iterator[Judgement]:
    """Check `out` and `logsumexp` as `jax.vjp` returns them: a custom VJP has its own forward pass."""
    if "random" in subject.cotangents:
        yield judge_out(subject, subject.gradients("random"))
    if "random_lse" in subject.cotangents:
        result = subject.gradients("random_lse")
        yield judge_out(subject, result, label="out_with_residuals")
        yield judge_residual(subject, "logsumexp", result)


def judge_out(subject: Subject, result: Result, *, label: str = "out", judged: np.ndarray | None = None) -> Judgement:
    """Judge `out` and its dtype by the case's expectation, in the elements `judged` (`subject.judged_out` if None)."""
    got = result.values["out"]
    if got.dtype != subject.problem.q.dtype:
        wrong = f"dtype is {got.dtype}, must be that of q, {subject.problem.q.dtype}"
        return subject.judge_malformed("out", wrong, label=label)
    rows = subject.judged_out if judged is None else judged
    return subject.judge("out", got, subject.expectation.forward["out"], rows, label=label)


def judge_residual(subject: Subject, name: str, result: Result, *, judged: np.ndarray | None = None) -> Judgement:
    """Judge a residual and its dtype by the expectation, in elements `judged` (`subject.judged_residuals` if None)."""
    if name not in result.values:
        residuals = {other: x for other, x in result.values.items() if other != "out"}
        return subject.judge_malformed(name, returned_values.describe_residuals(residuals, f"without {name!r}"))
    rows = subject.judged_residuals if judged is None else judged
    return subject.judge_residual(name, result.values[name], subject.expectation.forward[name], rows)
