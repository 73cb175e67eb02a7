"""Check `differentiation`: the pullback obeys laws that hold whatever the gradients are.

- Zero cotangents give zero gradients.
- The gradients of a sum of cotangents are the sum of their gradients.
- Gradients agree with finite differences of the implementation's own forward pass.

Special cotangents are compared with the oracle: ones, as the loss `out.sum()` has, a constant, and mostly zeros. Random
cotangents never look like these.

`check_second_derivatives` belongs to the check `transforms`. It compares second derivatives with finite differences of
the implementation's gradients. If JAX cannot differentiate a backward pass, they may silently be zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cases.counter_rng import draw_normal
from cases.moba_mask import depends_on_data
from cases.operand_registry import GRADIENT_OF
from cases.operand_values import Cotangent, Problem
from conformance.check_api.judgement import Judgement, build_unsupported, format_distinct
from conformance.check_api.subject import Subject
from conformance.executor_tasks import transformed_calls
from conformance.truth.rounding_bounds import Bounded
from reports import records

_OPERAND = {gradient: operand for operand, gradient in GRADIENT_OF.items()}
# The step of finite differences, in units of a standard normal direction. The rounding error of a difference grows as
# 1/step and its curvature error as step**2. Moving an operand by one step changes logits by a few steps.
_STEP = 2.0**-5
# The constant cotangent. It is exact in every dtype, and differs from 1, the cotangent of the loss `out.sum()`.
_CONSTANT = 0.75


def check_differentiation(subject: Subject) -> Iterator[Judgement]:
    """Check the pullback by zero, constant and sparse cotangents, by sums, and in f32 by finite differences."""
    if not subject.has_gradients:
        return
    yield from _check_zero(subject)
    yield from _check_ones(subject)
    yield from _check_sum(subject)
    if subject.case.dtype == "f32":
        yield from _check_finite_differences(subject)
    yield from _check_sparse_cotangents(subject)


def _check_zero(subject: Subject) -> Iterator[Judgement]:
    """Check that a zero cotangent gives zero gradients."""
    cotangent = _scale_cotangent(subject.cotangents[subject.full_cotangent], 0.0)
    for name, got in _compute_gradients(subject, cotangent).items():
        zeros = np.zeros(got.shape)
        yield _judge(subject, f"{name}.zero", name, got, Bounded(zeros, zeros))


def _check_ones(subject: Subject) -> Iterator[Judgement]:
    """Check the gradients for a cotangent of ones: those of the sum of all judged rows of `out`."""
    like = subject.cotangents[subject.full_cotangent]
    lse = None if like.logsumexp is None else np.zeros_like(like.logsumexp)
    cotangent = dataclasses.replace(like, out=subject.judged_out * np.ones_like(like.out), logsumexp=lse)
    expected = subject.expect(subject.problem, [cotangent]).gradients[0]
    for name, got in _compute_gradients(subject, cotangent).items():
        yield _judge(subject, f"{name}.ones", name, got, expected[name])


def _check_sparse_cotangents(subject: Subject) -> Iterator[Judgement]:
    """Check the gradients for a constant cotangent and for cotangents that are mostly zero.

    The constant one is that of a loss which takes the mean of `out`. The others are nonzero at one element, in one
    column, or in the first row of the first head with a nonzero cotangent.
    """
    like = subject.cotangents[subject.full_cotangent]
    nonzero = np.argwhere(like.out)
    if not len(nonzero):
        return
    place, (batch, row, head, _) = tuple(nonzero[len(nonzero) // 3]), nonzero[0]
    parts: dict[str, tuple[Any, ...]] = {"element": place, "column": (..., place[-1]), "first": (batch, row, head)}
    lse = None if like.logsumexp is None else np.zeros_like(like.logsumexp)
    cotangents = {"constant": subject.judged_out * np.full_like(like.out, _CONSTANT)}
    for name, index in parts.items():
        cotangents[name] = np.zeros_like(like.out)
        cotangents[name][index] = like.out[index]
    sparse = [dataclasses.replace(like, out=out, logsumexp=lse) for out in cotangents.values()]
    expected = subject.expect(subject.problem, sparse).gradients
    for name, cotangent, bounded in zip(cotangents, sparse, expected, strict=True):
        for gradient, got in _compute_gradients(subject, cotangent).items():
            yield _judge(subject, f"{gradient}.{name}", gradient, got, bounded[gradient])


def _check_sum(subject: Subject) -> Iterator[Judgement]:
    """Check that the gradients for a cotangent are the sum of those for its even and for its odd queries."""
    whole = subject.cotangents[subject.full_cotangent]
    parts = [_keep_queries(whole, slice(start, None, 2)) for start in (0, 1)]
    halves = [_compute_gradients(subject, part) for part in parts]
    at_once = subject.gradients(subject.full_cotangent).values
    bounds = subject.expect(subject.problem, [whole, *parts]).gradients
    for name in halves[0]:
        summed = halves[0][name].astype(np.float64) + halves[1][name].astype(np.float64)
        bound = sum(expected[name].bound for expected in bounds)
        yield _judge(subject, f"{name}.sum", name, summed, Bounded(at_once[name].astype(np.float64), np.asarray(bound)))


def _check_finite_differences(subject: Subject) -> Iterator[Judgement]:
    """Check `<gradient, direction>` against central differences of `<out, cotangent>`, in f32.

    Each operand is moved along a random direction. Differences are taken at one step and at half of it. They differ by
    at least twice the curvature error of the half step. A query may choose other keys at one of these points (a mask
    that depends on data). Its output jumps there, so the query gets a zero cotangent.
    """
    cotangent = dataclasses.replace(subject.cotangents[subject.full_cotangent], logsumexp=None)
    gradients = _compute_gradients(subject, cotangent)
    for name in gradients:
        direction = _draw_direction(subject, _OPERAND[name])
        problems = {
            step: [_move_operand(subject, _OPERAND[name], sign * step * direction) for sign in (1, -1)]
            for step in (_STEP, _STEP / 2)
        }
        unchanged = _find_unchanged_choices(subject.problem, [moved for pair in problems.values() for moved in pair])
        smooth, gradient = cotangent, gradients[name]
        if not unchanged.all():
            smooth = dataclasses.replace(
                cotangent, out=np.where(unchanged, cotangent.out, np.zeros_like(cotangent.out))
            )
            gradient = _compute_gradients(subject, smooth)[name]
        weights = smooth.out.astype(np.float64)
        noise = np.sqrt(np.sum((weights * subject.expectation.forward["out"].bound) ** 2))
        discrepancy, distance = {}, 0.0
        for step, pair in problems.items():
            ahead, behind = (_run_moved(subject, _OPERAND[name], problem) for problem in pair)
            difference = (ahead.out - behind.out) * weights
            moved = _subtract(ahead.operand, behind.operand)
            discrepancy[step] = float(difference.sum()) - float(np.sum(gradient.astype(np.float64) * moved))
            distance = float(np.abs(moved).max())
        error = abs(discrepancy[_STEP / 2])
        allowed = (
            abs(discrepancy[_STEP] / 2 - discrepancy[_STEP / 2]) + 2 * subject.limits.limit("f32", "out").ratio * noise
        )
        yield Judgement(
            observable=f"{name}.differences",
            verdict=records.PASS if error <= allowed else records.FAIL,
            ratio=error / allowed,
            limit=1.0,
            reason=""
            if error <= allowed
            else f"moving {_OPERAND[name]} by up to {distance:.2g} changes <out, cotangent> by "
            + "{} more or less than the gradient says; rounding and curvature explain {}".format(
                *format_distinct(error, allowed)
            ),
        )


@dataclasses.dataclass(frozen=True)
class _Moved:
    """An operand after it was moved and rounded to its dtype, and the resulting `out`, both in float64."""

    operand: np.ndarray
    out: np.ndarray


def _move_operand(subject: Subject, operand: str, by: np.ndarray) -> Problem:
    """Return the problem with one operand moved, and rounded to its dtype."""
    value = getattr(subject.problem, operand)
    changed: dict[str, Any] = {operand: (value.astype(np.float64) + by).astype(value.dtype)}
    return dataclasses.replace(subject.problem, **changed)


def _run_moved(subject: Subject, operand: str, problem: Problem) -> _Moved:
    """Run the call without residuals on a problem with a moved operand; unjudged rows of `out` become zero."""
    out = subject.run_forward(problem).values["out"].astype(np.float64)
    return _Moved(getattr(problem, operand).astype(np.float64), np.where(subject.judged_out, out, 0.0))


def _subtract(ahead: np.ndarray, behind: np.ndarray) -> np.ndarray:
    """Return `ahead - behind`, and 0 where both are equal: a sink of minus infinity cannot be moved."""
    with np.errstate(invalid="ignore"):
        return np.where(ahead == behind, 0.0, ahead - behind)


def _find_unchanged_choices(problem: Problem, others: Sequence[Problem]) -> np.ndarray:
    """Find the queries that attend to the same keys in `problem` and in all `others`; booleans `[B, T, N, 1]`."""
    if not depends_on_data(problem.mask):
        return np.ones((1, 1, 1, 1), bool)
    same = [((other.allowed == problem.allowed).all(axis=-1) & other.decided) for other in others]
    return np.logical_and.reduce(same).transpose(0, 2, 1)[..., None]


def _draw_direction(subject: Subject, operand: str) -> np.ndarray:
    direction: np.ndarray = draw_normal(
        subject.case.seed, f"direction-{operand}", getattr(subject.problem, operand).shape
    )
    return direction


def _compute_gradients(subject: Subject, cotangent: Cotangent) -> Mapping[str, np.ndarray]:
    """Return the offered gradients for a cotangent, by name."""
    values = subject.run_gradients(subject.problem, cotangent).values
    return {name: values[name] for name in _OPERAND if name in values and name in subject.implementation.gradients}


def _scale_cotangent(cotangent: Cotangent, factor: float) -> Cotangent:
    """Return the cotangent times a factor."""
    lse = cotangent.logsumexp
    scaled = (cotangent.out * np.asarray(factor, cotangent.out.dtype)).astype(cotangent.out.dtype)
    return dataclasses.replace(cotangent, out=scaled, logsumexp=None if lse is None else lse * np.float32(factor))


def _keep_queries(cotangent: Cotangent, rows: slice) -> Cotangent:
    """Return the cotangent with zeros for all queries outside the slice `rows`."""
    out = np.zeros_like(cotangent.out)
    out[:, rows] = cotangent.out[:, rows]
    if cotangent.logsumexp is None:
        return dataclasses.replace(cotangent, out=out)
    lse = np.zeros_like(cotangent.logsumexp)
    lse[..., rows] = cotangent.logsumexp[..., rows]
    return dataclasses.replace(cotangent, out=out, logsumexp=lse)


def _judge(subject: Subject, label: str, name: str, got: np.ndarray, expected: Bounded) -> Judgement:
    return subject.judge(name, got, expected, label=label)


def check_second_derivatives(subject: Subject) -> Iterator[Judgement]:
    """Check derivatives of `<gradients, weights>`, for random weights, by finite differences of the gradients, in f32.

    An implementation may refuse to be differentiated twice: any exception is reported as unsupported.
    """
    if subject.case.dtype != "f32" or depends_on_data(subject.problem.mask):
        return
    cotangent = dataclasses.replace(subject.cotangents[subject.full_cotangent], logsumexp=None)
    names = [
        name
        for name, gradient in GRADIENT_OF.items()
        if gradient in subject.implementation.gradients and getattr(subject.problem, name) is not None
    ]
    weights = {name: _draw_weights(subject, name) for name in names}
    try:
        derivatives = subject.executor.run(
            transformed_calls.run_second_derivative, subject.problem, cotangent.out, weights
        )
    except Exception as error:  # an exception of any type is a refusal: no wrong result was returned
        yield build_unsupported("second", f"{type(error).__name__}: {error}".split("\n")[0])
        return
    bounds = subject.get_expected_gradients(subject.full_cotangent)
    noise = np.sqrt(sum(np.sum((weights[name] * bounds[GRADIENT_OF[name]].bound) ** 2) for name in names))
    limit = subject.limits.limit("f32", "dq").ratio
    for name in names:
        direction = _draw_direction(subject, name)
        discrepancy = {
            step: _compute_discrepancy(subject, cotangent, weights, name, step * direction, derivatives)
            for step in (_STEP, _STEP / 2)
        }
        # The two discrepancies differ by at least twice the curvature error of the half step.
        allowed = abs(discrepancy[_STEP] / 2 - discrepancy[_STEP / 2]) + 2 * limit * float(noise)
        remaining = abs(discrepancy[_STEP / 2])
        agrees = remaining <= allowed
        yield Judgement(
            observable=f"second.{GRADIENT_OF[name]}",
            verdict=records.PASS if agrees else records.FAIL,
            ratio=remaining / allowed,
            limit=1.0,
            reason=""
            if agrees
            else f"moving {name} changes <gradients, weights> by "
            + "{} more or less than their derivative says; rounding and curvature explain {}".format(
                *format_distinct(remaining, allowed)
            ),
        )


def _draw_weights(subject: Subject, operand: str) -> np.ndarray:
    weights: np.ndarray = draw_normal(subject.case.seed, f"weights-{operand}", getattr(subject.problem, operand).shape)
    return weights


def _compute_discrepancy(
    subject: Subject,
    cotangent: Cotangent,
    weights: Mapping[str, np.ndarray],
    moved: str,
    by: np.ndarray,
    derivative: Mapping[str, np.ndarray],
) -> float:
    """Return the central difference of `<gradients, weights>` minus the one that the second derivative predicts.

    Args:
      weights: the weights of each gradient, by operand.
      derivative: the implementation's derivatives of `<gradients, weights>`, by operand.
    """
    value = getattr(subject.problem, moved)
    ends, along = [], []
    for sign in (1, -1):
        changed: dict[str, Any] = {moved: (value.astype(np.float64) + sign * by).astype(value.dtype)}
        problem = dataclasses.replace(subject.problem, **changed)
        gradients = subject.run_gradients(problem, cotangent).values
        ends.append(sum(float(np.sum(gradients[GRADIENT_OF[name]] * x)) for name, x in weights.items()))
        along.append(changed[moved].astype(np.float64))
    return ends[0] - ends[1] - float(np.sum(derivative[moved] * _subtract(*along)))
