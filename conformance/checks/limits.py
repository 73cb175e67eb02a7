"""Check `limits`: extreme values of soft cap, sinks, bias and keys give the results of their mathematical limits.

For example, a huge soft cap acts like no cap. A sink of minus infinity acts like no sink. A bias of minus infinity
hides a key.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from cases.masks import Dense
from cases.moba_mask import depends_on_data
from cases.operand_registry import WITH_OWN_CASES
from cases.operand_values import Cotangent, Problem, draw_cotangent, draw_problem
from cases.optional_operands.soft_cap_operand import HIGH_CAP
from conformance.check_api.judgement import Judgement, run_subcheck
from conformance.check_api.subject import Subject
from conformance.checks.gradients import check_problem
from conformance.truth.rounding_bounds import Bounded

# The finite sink that models use for "no sink". Its exponential is zero, like that of minus infinity.
_LOW_SINK = -1e30
# The distance of a high sink above the largest logit. exp of this distance overflows f32.
_HIGH_SINK = 150.0
# The distance of a sink of tiny weight below the smallest row maximum. The keys' probabilities sum to 1 within f32
# rounding. So a kernel that computes the sink's probability as 1 minus this sum gets only rounding error.
_TINY_WEIGHT_SINK = 30.0
# A factor for queries that makes logits so large that `exp(2 logit / cap)` overflows in f32.
_LOGIT_FACTOR = 2.0**8
# A bias more negative than some finite values that kernels use as minus infinity. Logits of this magnitude still have
# several fraction bits in f32, so the softmax of the row still depends on them.
_LOW_BIAS = -(2.0**20)
# The magnitude by which logits are lowered through q and k. It is more than 1e4, and a product of two numbers that
# every dtype represents exactly.
_LOW_LOGIT = 2.0**14
# The distance by which the logits of keys of tiny weight are lowered. Kernels might treat their weights as zero:
# exp(-32) is 2**-46.
_TINY_WEIGHT_KEYS = 32.0
# A factor for queries and bias that makes all other terms of the logits small.
_DAMPING = 2.0**-4
# The soft cap of Gemma 2.
_GEMMA_SOFT_CAP = 50.0
# The magnitude of a finite negative bias, so far beyond the cap that tanh is -1 in any arithmetic.
_BELOW_CAP = 2.0**14


def check_limits(subject: Subject) -> Iterator[Judgement]:
    """Check extreme soft caps, sinks and biases, and keys that have tiny weights.

    - A head whose logit scale is zero has uniform weights, and the exact gradient of its logit scale.
    - A soft cap of 2**20 gives the results without a cap. Logits far beyond a cap equal the cap.
    - Sinks of -1e30 or -inf give the results without sinks. High sinks take all the weight. Sinks of tiny weight have
    the exact
      gradient. A head is not affected by the sinks of other heads.
    - A bias of -inf gives the results of a mask that hides the same keys.
    - Keys of tiny weight count if their values are large.
    """
    problem = subject.problem
    for operand in WITH_OWN_CASES:  # the limits of soft cap, sinks and bias follow below
        if operand.null is not None and getattr(problem, operand.name) is not None:
            at_null = dataclasses.replace(problem, **{operand.name: operand.null(problem)})
            yield from _check_equal(subject, f"null_{operand.name}", at_null, problem.without(operand.name))
    if problem.logit_scale is not None:
        zero = dataclasses.replace(problem, logit_scale=_clear_first(problem.logit_scale))
        yield from _check_forward(subject, "zero_logit_scale", zero)
        yield from _check_gradients(subject, "zero_logit_scale", zero)
    if problem.soft_cap is not None:
        high = dataclasses.replace(problem, soft_cap=HIGH_CAP)
        yield from _check_equal(subject, "high_soft_cap", high, problem.without("soft_cap"))
        loud = dataclasses.replace(problem, q=problem.q * problem.q.dtype.type(_LOGIT_FACTOR))
        yield from _check_forward(subject, "loud", loud)
        yield from _check_gradients(subject, "loud", loud)
    if problem.sinks is not None:
        low = dataclasses.replace(problem, sinks=np.full_like(problem.sinks, _LOW_SINK))
        yield from _check_equal(subject, "low_sinks", low, problem.without("sinks"))
        yield from _check_gradients(subject, "low_sinks", low)
        none = dataclasses.replace(problem, sinks=np.full_like(problem.sinks, -np.inf))
        yield from _check_equal(subject, "no_sinks", none, problem.without("sinks"))
        if subject.implementation.empty_rows == "zero":
            yield from run_subcheck("nothing_left", functools.partial(_check_empty_rows, subject))
        high_sinks = _place_sinks(subject, _HIGH_SINK)
        yield from _check_forward(subject, "high_sinks", high_sinks)
        yield from _check_gradients(subject, "high_sinks", high_sinks)
        if problem.sinks.size > 1:
            yield from run_subcheck("sinks_apart", functools.partial(check_problem, subject, _alternate_sinks(subject)))
        if subject.has_gradients and "dsinks" in subject.implementation.gradients:
            yield from _check_tiny_weight_sinks(subject)
    # In f16 the weights of keys of tiny weight are zero.
    if problem.kv_scales is None and not (depends_on_data(problem.mask) or problem.tied or subject.case.dtype == "f16"):
        plain = problem.without("soft_cap").without("sinks")
        yield from run_subcheck("faint_keys", functools.partial(check_problem, subject, _add_tiny_weight_keys(plain)))
    if problem.bias is not None:
        # A cap would make the bias finite, and a sink would give every row some weight.
        # A bias that is declared to come after the soft cap is not capped, so the cap may stay.
        is_capped = "bias" not in problem.terms_after_cap
        plain = problem.without("sinks").without(*(("soft_cap",) if is_capped else ()))
        yield from run_subcheck("low_rows", functools.partial(_check_low_rows, subject, plain))
        if problem.soft_cap is not None and is_capped:
            yield from run_subcheck("capped_bias", functools.partial(_check_capped_bias, subject))
        yield from run_subcheck(
            "hiding_bias", functools.partial(_check_hiding_bias, subject, plain, _choose_hidden_keys(plain))
        )
        if subject.implementation.empty_rows == "zero" and plain.bias is not None and plain.bias.shape[2] > 1:
            yield from run_subcheck(
                "emptying_bias", functools.partial(_check_hiding_bias, subject, plain, _choose_hidden_rows(plain))
            )
        if problem.sinks is not None:
            yield from run_subcheck(
                "sinks_alone", functools.partial(_check_sinks_alone, subject, problem.without("soft_cap"))
            )
    elif problem.kv_scales is None and not depends_on_data(problem.mask):
        plain = problem.without("soft_cap").without("sinks")
        yield from run_subcheck("low_rows", functools.partial(_check_low_rows_by_queries, subject, plain))


def _clear_first(factors: np.ndarray) -> np.ndarray:
    """Return the factors `[N]` with zero for the first head: its weights are uniform, and its gradient is not zero."""
    cleared = factors.copy()
    cleared[0] = 0
    return cleared


def _choose_hidden_keys(problem: Problem) -> np.ndarray:
    """Choose keys for the bias to hide, as booleans of its shape: single keys, and long runs at the start.

    Each query that may attend to some key keeps at least one.
    """
    assert problem.bias is not None
    i, j = np.indices(problem.bias.shape)[2:]
    hidden = (j % 7 == 3) | ((j < problem.k.shape[1] // 2) & (i % 3 == 1))
    allowed = problem.allowed
    emptied = allowed.any(axis=-1) & ~(allowed & ~hidden).any(axis=-1)
    for axis, length in enumerate(problem.bias.shape[:3]):
        emptied = emptied.any(axis=axis, keepdims=True) if length == 1 else emptied
    return hidden & ~emptied[..., None]


def _choose_hidden_rows(problem: Problem) -> np.ndarray:
    """Choose all keys of every fifth query for the bias to hide, as booleans of its shape."""
    assert problem.bias is not None
    return np.indices(problem.bias.shape)[2] % 5 == 2


def _check_hiding_bias(subject: Subject, problem: Problem, hidden: np.ndarray) -> Iterator[Judgement]:
    """Check that a bias of -inf at `hidden` gives the results of a mask that hides the same keys."""
    assert problem.bias is not None
    shape = (*hidden.shape[:2], problem.q.shape[1], problem.k.shape[1])
    without = problem.resolved_mask & Dense(~np.broadcast_to(hidden, shape))
    masked = dataclasses.replace(problem, mask=without)
    biased = dataclasses.replace(problem, bias=np.where(hidden, -np.inf, problem.bias).astype(problem.bias.dtype))
    judged = subject.find_judged_rows(masked)
    if not subject.has_gradients:
        got = subject.executor.forward(biased).values
        yield subject.judge("out", got["out"], subject.expect(masked).forward["out"], judged)
        return
    drawn = draw_cotangent(subject.case).out
    cotangent = Cotangent("random", np.where(judged, drawn, np.zeros_like(drawn)))
    got, expected = subject.executor.gradients(biased, cotangent).values, subject.expect(masked, [cotangent])
    yield subject.judge("out", got["out"], expected.forward["out"], judged)
    for name in subject.implementation.gradients:
        if name in got:
            yield subject.judge(name, got[name], expected.gradients[0][name])


def _check_gradients(subject: Subject, what: str, problem: Problem) -> Iterator[Judgement]:
    """Check the gradients on another problem by the oracle.

    A backward pass may recompute probabilities, so it can fail where the forward pass is right.
    """
    if not subject.has_gradients:
        return
    drawn = draw_cotangent(subject.case).out
    cotangent = Cotangent("random", np.where(subject.find_judged_rows(problem), drawn, np.zeros_like(drawn)))
    got = subject.executor.gradients(problem, cotangent).values
    expected = subject.expect(problem, [cotangent]).gradients[0]
    for name in subject.implementation.gradients:
        if name in got:
            yield subject.judge(name, got[name], expected[name], label=f"{name}.{what}")


def _check_low_rows(subject: Subject, problem: Problem) -> Iterator[Judgement]:
    """Check every third row with a very low bias for all keys.

    All logits of such a row are below the finite numbers that some kernels use as minus infinity.
    """
    assert problem.bias is not None
    low = np.float64(_LOW_BIAS if problem.bias.dtype != np.float16 else -(2.0**14))
    rows = np.indices(problem.bias.shape)[2] % 3 == 0
    bias = np.where(rows, low, problem.bias).astype(problem.bias.dtype)
    yield from check_problem(subject, dataclasses.replace(problem, bias=bias))


def _check_low_rows_by_queries(subject: Subject, problem: Problem) -> Iterator[Judgement]:
    """Check every third row with very low logits for all keys, without a bias.

    The product of the first coordinates of q and k lowers the logits.
    """
    scale = problem.q.shape[-1] ** -0.5 if problem.scale is None else problem.scale
    root = 2.0 ** np.round(np.log2(_LOW_LOGIT / scale) / 2)
    q, k = problem.q.copy(), problem.k.copy()
    q[..., 0], k[..., 0] = 0, root
    q[:, ::3, :, 0] = -root
    yield from check_problem(subject, dataclasses.replace(problem, q=q, k=k))


def _add_tiny_weight_keys(problem: Problem) -> Problem:
    """Return the problem with tiny weights for the second half of the keys, and values larger by the same factor.

    The first coordinates of q and k, which are powers of two, lower the logits of these keys. All other terms of the
    logits are made small, so that these logits are below all others. All keys get the same segment id, so that the
    queries that attend to the first half attend to the second half too.
    """
    root, half = 2.0 ** np.round(np.log2(_TINY_WEIGHT_KEYS / problem.effective_scale) / 2), problem.k.shape[1] // 2
    low = 2.0 ** np.round(np.log2(_TINY_WEIGHT_KEYS / problem.effective_scale / root))
    q, k, v = problem.q * problem.q.dtype.type(_DAMPING), problem.k.copy(), problem.v.copy()
    q[..., 0], k[..., 0], k[:, half:, :, 0] = root, 0, -low
    v[:, half:] *= v.dtype.type(2.0 ** np.round(root * low * problem.effective_scale / np.log(2)))
    ids = problem.segment_ids
    if ids is not None:
        ids = np.zeros_like(ids[0]), np.zeros_like(ids[1])
    bias = None if problem.bias is None else problem.bias * problem.bias.dtype.type(_DAMPING)
    return dataclasses.replace(problem, q=q, k=k, v=v, segment_ids=ids, bias=bias)


def _check_capped_bias(subject: Subject) -> Iterator[Judgement]:
    """Check that under a soft cap a bias of -inf gives the lowest possible logit, -cap, and hides no key.

    The bias is added before the cap, so the capped logit is finite. Every fifth query has this bias for all keys. The
    cap is 50, as high as in any model. So these logits are 100 below the cap, a distance whose exp f32 cannot
    represent.
    """
    problem, bias = dataclasses.replace(subject.problem, soft_cap=_GEMMA_SOFT_CAP), subject.problem.bias
    assert bias is not None
    rows = np.indices(bias.shape)[2] % 5 == 2
    if problem.sinks is not None:
        # Beside a usual sink, keys with the logit -cap would have almost no weight.
        problem = dataclasses.replace(problem, sinks=np.full_like(problem.sinks, _LOW_SINK))
    # The expectation is that of a finite bias so low that the capped logit is -cap in any arithmetic.
    finite = np.where(rows, -_BELOW_CAP, bias).astype(bias.dtype)
    infinite = np.where(rows, -np.inf, bias).astype(bias.dtype)
    expected = subject.expect(dataclasses.replace(problem, bias=finite)).forward["out"]
    got = subject.run_results(dataclasses.replace(problem, bias=infinite))["out"]
    yield subject.judge("out", got, expected, subject.find_judged_rows(problem))


def _check_sinks_alone(subject: Subject, problem: Problem) -> Iterator[Judgement]:
    """Check that a sink takes all the weight in rows where a bias of -inf hides all keys."""
    assert problem.bias is not None
    rows = np.indices(problem.bias.shape)[2] % 5 == 2
    finite, infinite = (np.where(rows, hidden, problem.bias).astype(problem.bias.dtype) for hidden in (-1e4, -np.inf))
    expected = subject.expect(dataclasses.replace(problem, bias=finite)).forward
    live = ~problem.empty_rows & problem.decided
    for name, got in subject.run_results(dataclasses.replace(problem, bias=infinite)).items():
        if name != "max_logits":
            yield subject.judge(name, got, expected[name], subject.find_judged_rows(problem) if name == "out" else live)


def _check_empty_rows(subject: Subject) -> Iterator[Judgement]:
    """Check that a query without keys gets the results of an empty row if its sink is -inf.

    A kernel may rely on a finite sink to avoid NaN in such rows.
    """
    problem, padded = subject.problem, dataclasses.replace(subject.case, segments="segpad")
    if not problem.empty_rows.any():
        if subject.case.segments is None or subject.implementation.supports(padded) is not None:
            return
        problem = draw_problem(padded)
    assert problem.sinks is not None
    expected = subject.expect(problem.without("sinks")).forward
    none = dataclasses.replace(problem, sinks=np.full_like(problem.sinks, -np.inf))
    for name, got in subject.run_results(none).items():
        judged = subject.find_judged_rows(problem) if name == "out" else problem.decided
        yield subject.judge(name, got, expected[name], judged)


def _check_tiny_weight_sinks(subject: Subject) -> Iterator[Judgement]:
    """Check the gradient of sinks that have tiny weights.

    The gradient is small, so a kernel must not compute it as a difference of numbers near 1.
    """
    low = _place_sinks(subject, -_TINY_WEIGHT_SINK)
    drawn = draw_cotangent(subject.case).out
    cotangent = Cotangent("random", np.where(subject.find_judged_rows(low), drawn, np.zeros_like(drawn)))
    got = subject.executor.gradients(low, cotangent).values
    expected = subject.expect(low, [cotangent]).gradients[0]
    yield subject.judge("dsinks", got["dsinks"], expected["dsinks"], label="dsinks.faint_sinks")


def _place_sinks(subject: Subject, above: float) -> Problem:
    """Return the problem with all sinks at the distance `above` from the row maxima of the logits.

    If `above` is positive, the sinks are above the largest row maximum. If it is negative, they are below the smallest.
    """
    top = subject.expectation.forward["max_logits"].value
    finite = top[np.isfinite(top)]
    place = 0.0 if not finite.size else float(finite.max() if above > 0 else finite.min())
    assert subject.problem.sinks is not None
    return dataclasses.replace(subject.problem, sinks=np.full_like(subject.problem.sinks, place + above))


def _alternate_sinks(subject: Subject) -> Problem:
    """Return the problem with high sinks in even heads and sinks of tiny weight in odd heads.

    High sinks take all the weight of a row, the others almost none.
    """
    high, low = _place_sinks(subject, _HIGH_SINK), _place_sinks(subject, -_TINY_WEIGHT_SINK)
    assert high.sinks is not None
    assert low.sinks is not None
    return dataclasses.replace(high, sinks=np.where(np.arange(high.sinks.size) % 2, low.sinks, high.sinks))


def _check_forward(subject: Subject, what: str, problem: Problem) -> Iterator[Judgement]:
    """Check the forward results on another problem by the oracle."""
    expected = subject.expect(problem).forward
    for name, got in subject.run_results(problem).items():
        live = ~problem.empty_rows | (subject.implementation.empty_rows == "zero")
        judged = subject.find_judged_rows(problem) if name == "out" else live & problem.decided
        yield subject.judge(name, got, expected[name], judged, label=f"{name}.{what}")


def _check_equal(subject: Subject, what: str, limit: Problem, without: Problem) -> Iterator[Judgement]:
    """Check that the problem `limit` gives the results of the problem `without`.

    The bound is the sum of both bounds and of the difference between the exact results.
    """
    got, plain = subject.run_results(limit), subject.run_results(without)
    expected, expected_plain = (subject.expect(problem).forward for problem in (limit, without))
    for name in got:
        one, other = expected[name], expected_plain[name]
        with np.errstate(invalid="ignore"):
            bound = one.bound + other.bound + np.nan_to_num(np.abs(one.value - other.value))
        live = ~without.empty_rows
        judged = live.transpose(0, 2, 1)[..., None] if name == "out" else live
        agreeing = Bounded(plain[name].astype(np.float64), bound)
        yield subject.judge(name, got[name], agreeing, judged, label=f"{name}.{what}")
