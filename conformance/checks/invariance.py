"""Invariance: the same attention asked in another way gives the same results, within rounding.

No oracle decides: one answer of the implementation is compared with another, within the error bounds of both. The other
ways are: keys in another order; keys cut in two, and the results merged by `logsumexp`; padding that nobody may attend
to; other block sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from cases.inputs import Problem
from cases.masks import Full, conjuncts
from cases.operands import PLACED, RESIDUALS
from conformance.asking.judgement import Judgement, unsupported
from conformance.asking.subject import Subject
from conformance.truth.bounds import Bounded, Expectation

Values = Mapping[str, np.ndarray]


def invariance(subject: Subject) -> Iterator[Judgement]:
    """Permuted keys, keys merged from two halves, padding and other block sizes give the same results."""
    if subject.problem.storage is None:
        yield from _with_every_key(subject)
        yield from _padded(subject)
    else:
        for name in ("permuted", "merged", "padded"):
            yield unsupported(name, "where keys lie is said by tables, and other keys lie elsewhere")
    yield from _variants(subject)


def _with_every_key(subject: Subject) -> Iterator[Judgement]:
    """The ways that have a meaning only where mask and operands treat all keys alike; others are left out."""
    if (reason := subject.implementation.supports(dataclasses.replace(subject.case, mask="full"))) is not None:
        yield unsupported("permuted", reason)
        yield unsupported("merged", reason)
        return
    problem = dataclasses.replace(subject.problem.without(*PLACED), mask=Full())
    whole = subject.results_of(problem)
    expected = subject.expect(problem)
    yield from _compared(subject, "permuted", subject.results_of(_permuted(problem)), whole, expected)
    if "logsumexp" not in subject.implementation.residuals:
        yield unsupported("merged", "logsumexp is not offered")
        return
    bare = problem.without("sinks")
    if problem.sinks is not None:
        whole, expected = subject.results_of(bare), subject.expect(bare)
    # Every second key, so that each half has keys of every segment.
    parts = [_part(subject, _keys(bare, slice(start, None, 2))) for start in (0, 1)]
    yield from _compared(subject, "merged", _merged(parts), whole, expected)


def _part(subject: Subject, problem: Problem) -> Values:
    """Results over some of the keys. Empty rows are left out where they are declared undefined."""
    part = subject.results_of(problem)
    if subject.implementation.empty_rows == "zero":
        return part
    empty = problem.empty_rows
    return {
        "out": np.where(empty.transpose(0, 2, 1)[..., None], 0, part["out"]),
        "logsumexp": np.where(empty, -np.inf, part["logsumexp"]),
    }


def _permuted(problem: Problem) -> Problem:
    order = np.random.Generator(np.random.Philox(0)).permutation(problem.k.shape[1])
    return _keys(problem, order)


def _keys(problem: Problem, keys: np.ndarray | slice) -> Problem:
    """The problem with these keys only, in this order."""
    return problem.along("S", lambda x, axis: x[(slice(None),) * axis + (keys,)])


def _merged(parts: list[Values]) -> Values:
    """Attention over all keys from normalised parts and their `logsumexp` (docs/contract.md, section 4)."""
    lse = np.stack([part["logsumexp"].astype(np.float64) for part in parts])
    top = lse.max(axis=0)
    weight = np.exp(lse - np.where(np.isfinite(top), top, 0.0))
    total = weight.sum(axis=0)
    out = sum(
        w.transpose(0, 2, 1)[..., None] * part["out"].astype(np.float64)
        for w, part in zip(weight / np.where(total == 0, 1, total), parts, strict=True)
    )
    with np.errstate(divide="ignore"):
        merged = np.where(np.isfinite(top), top, 0.0) + np.log(total)
    return {"out": np.asarray(out), "logsumexp": merged}


def _padded(subject: Subject) -> Iterator[Judgement]:
    """One more query and one more key ahead of the others, in segments of their own: the length becomes odd.

    It is ahead so that the last key, which may then be alone in its block, is one that counts.
    """
    problem = subject.problem
    if not all(part.relative for part in conjuncts(problem.mask)):
        yield unsupported("padded", "the mask of this case means another one at other positions")
        return
    if (reason := subject.implementation.supports(dataclasses.replace(subject.case, segments="seg"))) is not None:
        yield unsupported("padded", reason)
        return
    batch, q_length = problem.q.shape[:2]
    kv_length = problem.k.shape[1]
    ids = problem.segment_ids or (np.zeros((batch, q_length), np.int32), np.zeros((batch, kv_length), np.int32))
    q_ids, kv_ids = (np.pad(x, [(0, 0), (1, 0)], constant_values=n) for x, n in zip(ids, (-1, -2), strict=True))
    longer = problem.along("T", _first_twice).along("S", _first_twice)
    longer = dataclasses.replace(longer, segment_ids=(q_ids, kv_ids))
    got = subject.results_of(longer)
    kept = {name: x[:, 1:] if name == "out" else x[..., 1:] for name, x in got.items()}
    yield from _compared(subject, "padded", kept, subject.results_of(problem), subject.expectation)


def _first_twice(x: np.ndarray, axis: int) -> np.ndarray:
    return np.concatenate([x.take([0], axis), x], axis)


def _variants(subject: Subject) -> Iterator[Judgement]:
    clean = subject.results_of(subject.problem)
    for name in subject.implementation.variants:
        variant = dataclasses.replace(subject, executor=subject.executor.variant(name))
        got = variant.results_of(subject.problem)
        yield from _compared(subject, name, got, clean, subject.expectation)
        if not subject.with_gradients:
            continue
        cotangent = subject.any_random
        here, there = subject.gradients(cotangent), variant.gradients(cotangent)
        for gradient, expected in subject.expected_gradients(cotangent).items():
            if gradient in subject.implementation.gradients:
                yield _agree(subject, gradient, name, there.values[gradient], here.values[gradient], expected)


def _compared(subject: Subject, how: str, got: Values, whole: Values, expected: Expectation) -> Iterator[Judgement]:
    for name in ("out", *RESIDUALS):
        if name in got and name in whole:
            yield _agree(subject, name, how, got[name], whole[name], expected.forward[name])


def _agree(subject: Subject, name: str, how: str, got: np.ndarray, whole: np.ndarray, expected: Bounded) -> Judgement:
    """One answer against the other; each may be off by its own bound."""
    both = Bounded(whole.astype(np.float64), np.where(np.isfinite(expected.value), 2 * expected.bound, 0.0))
    judged = {"out": subject.judged_out, **dict.fromkeys(RESIDUALS, subject.judged_residuals)}.get(name)
    return subject.judge(name, got, both, judged, label=f"{name}.{how}")
