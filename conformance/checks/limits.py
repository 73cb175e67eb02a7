"""Limits: a soft cap that goes to infinity is no cap, a sink to minus infinity no sink, a sink to infinity no keys.

And a bias of minus infinity hides a key.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from cases.masks import Dense
from cases.moba_mask import depends_on_data
from cases.operand_values import Cotangent, Problem, draw_cotangent, draw_problem
from conformance import records
from conformance.check_api.judgement import Judgement, run_subcheck
from conformance.check_api.subject import Subject
from conformance.checks.gradients import check_problem
from conformance.truth.rounding_bounds import Bounded

# Far above any logit: it bends them by less than their rounding.
_HIGH_CAP = 2.0**20
# Its exponential is zero, like that of minus infinity. Sinks that are switched off are written so: finite.
_LOW_SINK = -1e30
# Above the largest logit by more than exp can bear in f32.
_HIGH_SINK = 150.0
# Below the logits by so much that all probabilities but the sink's add up to 1 in f32: its own is not what they leave.
_FAINT_SINK = 30.0
# Beyond the cap by so much that `exp(2 logit / cap)` overflows in f32.
_LOGIT_FACTOR = 2.0**8
# Below what kernels write for minus infinity by hand, and little enough that logits keep four bits of their fraction.
_LOW_BIAS = -(2.0**20)
# Below -1e4, and a number that products in every dtype can have.
_LOW_LOGIT = 2.0**14
# Lowers logits until the weights of their keys are what kernels leave out as nothing: exp(-32) is 2**-46.
_FAINT_KEYS = 32.0
_DAMPING = 2.0**-4
# That of Gemma 2.
_GEMMA_SOFT_CAP = 50.0
# So far below any cap that its tanh is -1 in every arithmetic.
_BELOW_CAP = 2.0**14


def check_limits(subject: Subject) -> Iterator[Judgement]:
    """Soft caps of 2**20, and sinks of -1e30 or -inf, give the results without; high sinks take all the weight.

    Faint sinks have the gradient that they should, heads do not feel each other's sinks, and logits far beyond the cap
    are the cap. With a bias of -inf results are those of a mask that hides the same keys.
    """
    problem = subject.problem
    if problem.soft_cap is not None:
        high = dataclasses.replace(problem, soft_cap=_HIGH_CAP)
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
            yield from _check_faint_sinks(subject)
    if problem.kv_scales is None and not depends_on_data(problem.mask):
        yield from run_subcheck("nan", functools.partial(_check_nan, subject))
        if not problem.tied and subject.case.dtype != "f16":  # what f16 has of such a weight is zero
            plain = problem.without("soft_cap").without("sinks")
            yield from run_subcheck("faint_keys", functools.partial(check_problem, subject, _add_faint_keys(plain)))
    if problem.bias is not None:
        # A cap would make it finite, and a sink would leave no row without weight.
        plain = problem.without("soft_cap").without("sinks")
        yield from run_subcheck("low_rows", functools.partial(_check_low_rows, subject, plain))
        if problem.soft_cap is not None:
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


def _choose_hidden_keys(problem: Problem) -> np.ndarray:
    """Places in the bias, of its shape, that leave every row a key: single keys, and long runs at the start."""
    assert problem.bias is not None
    i, j = np.indices(problem.bias.shape)[2:]
    hidden = (j % 7 == 3) | ((j < problem.k.shape[1] // 2) & (i % 3 == 1))
    allowed = problem.allowed
    emptied = allowed.any(axis=-1) & ~(allowed & ~hidden).any(axis=-1)
    for axis, length in enumerate(problem.bias.shape[:3]):
        emptied = emptied.any(axis=axis, keepdims=True) if length == 1 else emptied
    return hidden & ~emptied[..., None]


def _choose_hidden_rows(problem: Problem) -> np.ndarray:
    """Likewise, all of every fifth row."""
    assert problem.bias is not None
    return np.indices(problem.bias.shape)[2] % 5 == 2


def _check_hiding_bias(subject: Subject, problem: Problem, hidden: np.ndarray) -> Iterator[Judgement]:
    """With -inf in the bias at `hidden`, results and gradients are those of a mask that hides the same."""
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
    """The gradients on another problem are those of the oracle: a backward pass computes weights anew."""
    if not subject.has_gradients:
        return
    drawn = draw_cotangent(subject.case).out
    cotangent = Cotangent("random", np.where(subject.find_judged_rows(problem), drawn, np.zeros_like(drawn)))
    got = subject.executor.gradients(problem, cotangent).values
    expected = subject.expect(problem, [cotangent]).gradients[0]
    for name in subject.implementation.gradients:
        if name in got:
            yield subject.judge(name, got[name], expected[name], label=f"{name}.{what}")


def _check_nan(subject: Subject) -> Iterator[Judgement]:
    """A key and value of NaN make every row NaN that attends to it: a model that diverged must not look as if not."""
    problem = subject.problem
    seen = np.broadcast_to(problem.allowed, (*subject.judged_residuals.shape, problem.k.shape[1]))  # [B, N, T, S]
    key = int(np.argmax(seen.any(axis=(0, 1, 2))))
    k, v = problem.k.copy(), problem.v.copy()
    k[:, key], v[:, key] = np.nan, np.nan
    out = subject.run_forward(dataclasses.replace(problem, k=k, v=v)).values["out"]
    attends = np.moveaxis(seen[..., key], 1, 2)[..., None]
    lost = int((attends & np.isfinite(out.astype(np.float64))).any(axis=-1).sum())
    reason = f"{lost} rows are finite that attend to a key and value of NaN" if lost else ""
    yield Judgement(observable="out", verdict=records.FAIL if lost else records.PASS, reason=reason)


def _check_low_rows(subject: Subject, problem: Problem) -> Iterator[Judgement]:
    """A third of the rows has all of its logits far below the others: what is written for minus infinity is above."""
    assert problem.bias is not None
    low = np.float64(_LOW_BIAS if problem.bias.dtype != np.float16 else -(2.0**14))
    rows = np.indices(problem.bias.shape)[2] % 3 == 0
    bias = np.where(rows, low, problem.bias).astype(problem.bias.dtype)
    yield from check_problem(subject, dataclasses.replace(problem, bias=bias))


def _check_low_rows_by_queries(subject: Subject, problem: Problem) -> Iterator[Judgement]:
    """Likewise of those that take no bias: the first of the depths lowers the logits of a third of the rows."""
    scale = problem.q.shape[-1] ** -0.5 if problem.scale is None else problem.scale
    root = 2.0 ** np.round(np.log2(_LOW_LOGIT / scale) / 2)
    q, k = problem.q.copy(), problem.k.copy()
    q[..., 0], k[..., 0] = 0, root
    q[:, ::3, :, 0] = -root
    yield from check_problem(subject, dataclasses.replace(problem, q=q, k=k))


def _add_faint_keys(problem: Problem) -> Problem:
    """The problem with next to no weight for the second half of the keys, whose values are as much larger.

    The first of the depths lowers their logits, by powers of two, and what else is in them is made small, so that all
    of them are below the others. All of a row are of one segment, so that both halves are seen by the same queries.
    """
    root, half = 2.0 ** np.round(np.log2(_FAINT_KEYS / problem.effective_scale) / 2), problem.k.shape[1] // 2
    low = 2.0 ** np.round(np.log2(_FAINT_KEYS / problem.effective_scale / root))
    q, k, v = problem.q * problem.q.dtype.type(_DAMPING), problem.k.copy(), problem.v.copy()
    q[..., 0], k[..., 0], k[:, half:, :, 0] = root, 0, -low
    v[:, half:] *= v.dtype.type(2.0 ** np.round(root * low * problem.effective_scale / np.log(2)))
    ids = problem.segment_ids
    if ids is not None:
        ids = np.zeros_like(ids[0]), np.zeros_like(ids[1])
    bias = None if problem.bias is None else problem.bias * problem.bias.dtype.type(_DAMPING)
    return dataclasses.replace(problem, q=q, k=k, v=v, segment_ids=ids, bias=bias)


def _check_capped_bias(subject: Subject) -> Iterator[Judgement]:
    """Under a soft cap a bias of -inf makes the logit the lowest that there is, and hides nothing.

    The cap is as high as models have it: from there to the cap is more than exp can bear.
    """
    problem, bias = dataclasses.replace(subject.problem, soft_cap=_GEMMA_SOFT_CAP), subject.problem.bias
    assert bias is not None
    rows = np.indices(bias.shape)[2] % 5 == 2
    if problem.sinks is not None:
        # Beside a sink keys at the bottom of the cap have next to no weight.
        problem = dataclasses.replace(problem, sinks=np.full_like(problem.sinks, _LOW_SINK))
    # So far below the cap that it is -cap in any arithmetic.
    finite = np.where(rows, -_BELOW_CAP, bias).astype(bias.dtype)
    infinite = np.where(rows, -np.inf, bias).astype(bias.dtype)
    expected = subject.expect(dataclasses.replace(problem, bias=finite)).forward["out"]
    got = subject.run_results(dataclasses.replace(problem, bias=infinite))["out"]
    yield subject.judge("out", got, expected, subject.find_judged_rows(problem))


def _check_sinks_alone(subject: Subject, problem: Problem) -> Iterator[Judgement]:
    """Rows with a sink, whose keys a bias of -inf hides: the sink has all the weight."""
    assert problem.bias is not None
    rows = np.indices(problem.bias.shape)[2] % 5 == 2
    finite, infinite = (np.where(rows, hidden, problem.bias).astype(problem.bias.dtype) for hidden in (-1e4, -np.inf))
    expected = subject.expect(dataclasses.replace(problem, bias=finite)).forward
    live = ~problem.empty_rows & problem.decided
    for name, got in subject.run_results(dataclasses.replace(problem, bias=infinite)).items():
        if name != "max_logits":
            yield subject.judge(name, got, expected[name], subject.find_judged_rows(problem) if name == "out" else live)


def _check_empty_rows(subject: Subject) -> Iterator[Judgement]:
    """Rows without keys whose sink is -inf are empty rows: what keeps them finite is no sink."""
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


def _check_faint_sinks(subject: Subject) -> Iterator[Judgement]:
    """Sinks that take next to nothing: their gradient is small, and no difference of numbers near 1."""
    faint = _place_sinks(subject, -_FAINT_SINK)
    drawn = draw_cotangent(subject.case).out
    cotangent = Cotangent("random", np.where(subject.find_judged_rows(faint), drawn, np.zeros_like(drawn)))
    got = subject.executor.gradients(faint, cotangent).values
    expected = subject.expect(faint, [cotangent]).gradients[0]
    yield subject.judge("dsinks", got["dsinks"], expected["dsinks"], label="dsinks.faint_sinks")


def _place_sinks(subject: Subject, above: float) -> Problem:
    """The problem with all sinks so far above the largest logit, or below the smallest of the rows' largest."""
    top = subject.expectation.forward["max_logits"].value
    finite = top[np.isfinite(top)]
    place = 0.0 if not finite.size else float(finite.max() if above > 0 else finite.min())
    assert subject.problem.sinks is not None
    return dataclasses.replace(subject.problem, sinks=np.full_like(subject.problem.sinks, place + above))


def _alternate_sinks(subject: Subject) -> Problem:
    """The problem with sinks of which every other takes all the weight and the others next to nothing."""
    high, faint = _place_sinks(subject, _HIGH_SINK), _place_sinks(subject, -_FAINT_SINK)
    assert high.sinks is not None
    assert faint.sinks is not None
    return dataclasses.replace(high, sinks=np.where(np.arange(high.sinks.size) % 2, faint.sinks, high.sinks))


def _check_forward(subject: Subject, what: str, problem: Problem) -> Iterator[Judgement]:
    """The forward results on another problem are those of the oracle."""
    expected = subject.expect(problem).forward
    for name, got in subject.run_results(problem).items():
        live = ~problem.empty_rows | (subject.implementation.empty_rows == "zero")
        judged = subject.find_judged_rows(problem) if name == "out" else live & problem.decided
        yield subject.judge(name, got, expected[name], judged, label=f"{name}.{what}")


def _check_equal(subject: Subject, what: str, limit: Problem, without: Problem) -> Iterator[Judgement]:
    """The two answers may differ by both their bounds, and by what they differ in exact arithmetic."""
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
