"""The forward pass: `out` of the plain call, the residuals, and the primal under `jax.vjp`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from cases.operand_registry import RESIDUALS
from conformance.check_api.judgement import Judgement, build_unsupported
from conformance.check_api.subject import Subject
from conformance.checks import page_comparison
from conformance.execution.executor import Result
from conformance.truth.comparison import compare


def check_forward(subject: Subject) -> Iterator[Judgement]:
    """`out` of the call without residuals is right, in shape and dtype too.

    With a quantised cache, right means: for the keys and values that the cache stands for. A figure beside the verdict
    says how far `out` is from attention to the keys and values before they were stored. It is a multiple of what
    rounding and storing explain.

    Where the call writes pages, `k_pages` and `v_pages` are what they must be, bit for bit.
    """
    judgement = judge_out(subject, subject.forward)
    if (before := subject.expectation_before_storing) is not None:
        comparison = compare(subject.forward.values["out"], before.forward["out"], subject.judged_out)
        judgement = dataclasses.replace(judgement, figures={"ratio_before_storing": comparison.ratio})
    yield judgement
    if subject.implementation.writes_pages:
        yield from page_comparison.check_pages(subject, save_residuals=False)


def check_residuals(subject: Subject) -> Iterator[Judgement]:
    """With `save_residuals=True`, `out` stays right and `logsumexp` and `max_logits` are."""
    offered = subject.implementation.residuals
    for name in RESIDUALS:
        if name not in offered:
            yield build_unsupported(name, f"{name} is not offered")
    if not offered:
        return
    result = subject.residuals
    yield judge_out(subject, result)
    for name in RESIDUALS:
        if name in offered:
            yield judge_residual(subject, name, result)
    if subject.implementation.writes_pages:
        yield from page_comparison.check_pages(subject, save_residuals=True)


def check_primal(subject: Subject) -> Iterator[Judgement]:
    """The value that `jax.vjp` returns is right as well: a custom VJP has a forward pass of its own."""
    if "random" in subject.cotangents:
        yield judge_out(subject, subject.gradients("random"))
    if "random_lse" in subject.cotangents:
        result = subject.gradients("random_lse")
        yield judge_out(subject, result, label="out_with_residuals")
        yield judge_residual(subject, "logsumexp", result)


def judge_out(subject: Subject, result: Result, *, label: str = "out", judged: np.ndarray | None = None) -> Judgement:
    """Judge `out` of a result."""
    got = result.values["out"]
    if got.dtype != subject.problem.q.dtype:
        wrong = f"dtype is {got.dtype}, must be that of q, {subject.problem.q.dtype}"
        return subject.malformed("out", wrong, label=label)
    rows = subject.judged_out if judged is None else judged
    return subject.judge("out", got, subject.expectation.forward["out"], rows, label=label)


def judge_residual(subject: Subject, name: str, result: Result, *, judged: np.ndarray | None = None) -> Judgement:
    """Judge a residual of a result."""
    if name not in result.values:
        return subject.malformed(name, f"the residuals have no entry {name!r}, which the implementation offers")
    rows = subject.judged_residuals if judged is None else judged
    return subject.judge(name, result.values[name], subject.expectation.forward[name], rows)
