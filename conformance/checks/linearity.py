"""Check `linearity`: attention is linear in v, and its pullback is linear in the cotangent.

No oracle is needed. The check multiplies an input by a factor and expects the result times the factor. Factors are
powers of two, which commute with every rounding. So the scaled result must be equal to the bit, except for overflow,
underflow and ties (`_MAX_TIES`). In f16, gradients of logits enter the second matrix product as subnormal numbers, so
underflow is everywhere. So in f16 the two results must only agree within their bounds. So must gradients whose sums are
declared to have another order from call to call.

One factor is large, since a factor of two would not show a clip or a threshold. The other one is tiny. It shows a
constant that is added to a cotangent, and a threshold below which a cotangent is taken for zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from cases.operand_values import Cotangent
from conformance.check_api.judgement import Judgement, add_label
from conformance.check_api.subject import Subject
from conformance.checks import repeated_calls
from conformance.execution.executor import Values
from conformance.truth.rounding_bounds import Bounded
from conformance.truth.roundoff import UNIT_ROUNDOFF
from reports import records
from reports.records import Worst

# The tiny factor for cotangents, by dtype. f16 has none, since all its gradients would underflow.
_TINY_FACTOR = {"f32": 2.0**-40, "bf16": 2.0**-40}
# The large factor for values and cotangents, by dtype.
_FACTOR = {"f32": 2.0**20, "bf16": 2.0**20, "f16": 2.0**4}
# The range of magnitudes that are judged. Results below `_MIN_EXACT` may have lost bits to underflow. Results above
# `_MAX_UNSCALED` may overflow when they are multiplied by the factor.
_MIN_EXACT = 2.0**-80
_MAX_UNSCALED = {"f32": 2.0**100, "bf16": 2.0**100, "f16": 2.0**11}


# The largest share of results that may differ by one rounding. A sum of large terms may be a tie, halfway between two
# numbers. Then a far smaller term decides how the sum is rounded, and that term may underflow in one of the two calls.
_MAX_TIES = 0.01


def check_linearity(subject: Subject) -> Iterator[Judgement]:
    """Check that `v` and cotangents times powers of two scale the results exactly.

    The factors are 2**20 (16 in f16), and 2**-40 for cotangents (not in f16).
    """
    if "linearity" not in subject.selection.laws:
        return
    factor = _FACTOR[subject.case.dtype]
    problem = subject.problem
    # Tied values are coordinates of the keys. They enter the logits too, so v cannot be scaled without k.
    fits = float(np.abs(problem.values).max()) * factor < _MAX_UNSCALED[subject.case.dtype]
    if fits and not problem.tied:
        if problem.kv_scales is None:
            scaled = dataclasses.replace(problem, v=_scale(problem.v, factor))
        elif problem.kv_global_scales is not None:
            k_scale, v_scale = problem.kv_global_scales
            scaled = dataclasses.replace(problem, kv_global_scales=(k_scale, v_scale * factor))
        else:
            k_scales, v_scales = problem.kv_scales
            scaled = dataclasses.replace(problem, kv_scales=(k_scales, _scale(v_scales, factor)))
            if problem.kv_zeros is not None:
                k_zeros, v_zeros = problem.kv_zeros
                scaled = dataclasses.replace(scaled, kv_zeros=(k_zeros, _scale(v_zeros, factor)))
        calls = subject.require_shapes(subject.forward), subject.require_shapes(subject.run_forward(scaled))
        before, after = (np.where(subject.judged_out, result.values["out"], 0) for result in calls)
        bound = np.where(subject.judged_out, subject.expectation.forward["out"].bound, 0)

        def repeat() -> Values:
            return {"out": np.where(subject.judged_out, subject.run_forward(problem).values["out"], 0)}

        yield from _judge_or_repeat(subject, "out", before, after, bound, factor, repeat)
    if subject.has_gradients:
        yield from _check_cotangents(subject, -factor)
        if (tiny := _TINY_FACTOR.get(subject.case.dtype)) is not None:
            yield from add_label("tiny", _check_cotangents(subject, tiny))


def _check_cotangents(subject: Subject, factor: float) -> Iterator[Judgement]:
    """Check that a cotangent times `factor` gives the gradients times `factor`."""
    cotangent = subject.cotangents[subject.full_cotangent]
    clean = subject.gradients(subject.full_cotangent)
    scaled = subject.run_gradients(subject.problem, _scale_cotangent(cotangent, factor))

    def repeat() -> Values:
        return subject.run_gradients(subject.problem, cotangent).values

    for name, expected in subject.get_expected_gradients(subject.full_cotangent).items():
        if name in subject.implementation.gradients:
            yield from _judge_or_repeat(
                subject, name, clean.values[name], scaled.values[name], expected.bound, factor, repeat
            )


def _scale_cotangent(cotangent: Cotangent, factor: float) -> Cotangent:
    lse = None if cotangent.logsumexp is None else _scale(cotangent.logsumexp, factor)
    return dataclasses.replace(cotangent, out=_scale(cotangent.out, factor), logsumexp=lse)


def _scale(x: np.ndarray, factor: float) -> np.ndarray:
    scaled: np.ndarray = (x.astype(np.float64) * factor).astype(x.dtype)
    return scaled


def _judge_or_repeat(
    subject: Subject,
    name: str,
    before: np.ndarray,
    after: np.ndarray,
    bound: np.ndarray,
    factor: float,
    repeat: Callable[[], Values],
) -> Iterator[Judgement]:
    """Judge whether `after` is `factor` times `before`; if not, repeat the first call before the factor is blamed."""
    is_unordered = name in subject.implementation.unordered_sums
    judgement = _judge_proportional(subject, name, before, after, bound, factor, is_unordered=is_unordered)
    if judgement.verdict == records.FAIL and not is_unordered:
        tries = repeated_calls.TRIES_BEFORE_BLAME
        if changes := repeated_calls.find_changes({name: before}, repeat, (name,), tries=tries):
            yield repeated_calls.judge_repetition(name, before, changes, bound)
            judgement = _judge_proportional(subject, name, before, after, bound, factor, is_unordered=True)
    yield judgement


def _judge_proportional(
    subject: Subject,
    name: str,
    before: np.ndarray,
    after: np.ndarray,
    bound: np.ndarray,
    factor: float,
    *,
    is_unordered: bool,
) -> Judgement:
    """Judge whether `after` is `factor` times `before`; in f16, or if sums are unordered, within twice the bound."""
    label = f"{name}.scaled"
    once, scaled = before.astype(np.float64), after.astype(np.float64) / factor
    if subject.case.dtype == "f16" or is_unordered:
        both = Bounded(once, 2 * bound)
        # A kernel may round the gradient of each head of a group before it sums them. The magnitude of these terms is
        # unknown: it is estimated by the bound.
        roundoff, most = UNIT_ROUNDOFF[subject.case.dtype], _MAX_UNSCALED[subject.case.dtype]
        fits = np.maximum(np.abs(once), bound / roundoff) < most
        return subject.judge(name, scaled, both, fits, label=label)
    # A result this small may have underflowed in one of the two calls and not in the other.
    smallest = _MIN_EXACT / min(1.0, abs(factor))
    underflowed = (np.abs(once) < smallest) & (np.abs(scaled) < smallest)
    wrong = ~underflowed & ~(scaled == once)
    if wrong.mean() <= _MAX_TIES and (np.abs(scaled - once)[wrong] <= 2 * bound[wrong]).all():
        return Judgement(observable=label, verdict=records.PASS)
    index = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    operand = "v" if name == "out" else "the cotangent"
    return Judgement(
        observable=label,
        verdict=records.FAIL,
        worst=Worst(tuple(int(n) for n in index), float(scaled[index]), float(once[index]), 0.0),
        reason=f"{int(wrong.sum())} of {wrong.size} values change if {operand} is multiplied by {factor:g} and the "
        "result is divided by it",
    )
