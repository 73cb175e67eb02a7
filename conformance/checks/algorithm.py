"""Check `algorithm`: judge what a kernel computes apart from rounding, by evaluating it in float64.

In 16 bits, an error below one rounding passes every comparison: an epsilon in a denominator, a key of little weight
that is dropped, a factor of a gradient. In float64 nothing is left of the roundings, so such an error stands alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from conformance.check_api.judgement import Judgement, format_distinct, judge_comparison
from conformance.check_api.subject import Subject
from conformance.executor_tasks import exact_calls
from conformance.truth.comparison import compare
from conformance.truth.declared_formulas import compute_declared_expectation_for_roundoff
from conformance.truth.error_patterns.failure import build_failure
from conformance.truth.rounding_bounds import Bounded
from conformance.truth.roundoff import Roundoff
from reports import records


def check_algorithm(subject: Subject) -> Iterator[Judgement]:
    """Check `out`, residuals and gradients of the kernel's program with every float in float64.

    What is left of the error comes from constants that were rounded when the program was traced, and from the
    algorithm. The bound allows the constants.
    """
    cotangent = next(
        (subject.cotangents[name] for name in ("random_lse", "random") if name in subject.cotangents), None
    )
    do, dlse = (None, None) if cotangent is None else (cotangent.out, cotangent.logsumexp)
    why, results = subject.executor.run(exact_calls.run_exactly, subject.problem, do, dlse)
    if why:
        yield Judgement(
            observable="all", verdict=records.UNJUDGED, reason=f"the program cannot be evaluated in float64: {why}"
        )
        return
    declared = subject.implementation
    expected = compute_declared_expectation_for_roundoff(
        subject.problem,
        Roundoff.of_constants(declared.arithmetic, subject.problem),
        declared.formulas,
        [] if cotangent is None else [cotangent],
        empty_rows=subject.empty_rows,
    )
    for name, bounded in expected.forward.items():
        if name in results:
            judged = subject.judged_out if name == "out" else subject.judged_residuals
            yield _judge(subject, name, results[name], bounded, subject.expectation.forward, judged)
    for gradients in expected.gradients:
        assert cotangent is not None
        with_rounding = subject.get_expected_gradients(cotangent.name)
        for name, bounded in gradients.items():
            if name in declared.gradients:
                yield _judge(subject, name, results[name], bounded, with_rounding)


def _judge(
    subject: Subject,
    observable: str,
    got: np.ndarray,
    expected: Bounded,
    with_rounding: Mapping[str, Bounded],
    judged: np.ndarray | None = None,
) -> Judgement:
    """Judge a result by its largest ratio: rounded constants move all elements alike, so their mean says no more.

    If the result fails, a figure says whether it would fail even if it was allowed to round as declared.
    """
    comparison = compare(got, expected, judged)
    limit = subject.limits.limit(subject.case.dtype, observable).ratio
    passes = comparison.ratio <= limit
    judgement = Judgement(
        observable=observable,
        verdict=records.PASS if passes else records.FAIL,
        ratio=comparison.ratio,
        limit=limit,
        worst=comparison.worst,
    )
    if passes:
        return judgement
    loosely = judge_comparison(
        observable,
        compare(got, with_rounding[observable], judged),
        dtype=subject.case.dtype,
        tolerances=subject.limits,
    )
    found, allowed = format_distinct(comparison.ratio, limit)
    return dataclasses.replace(
        judgement,
        reason=comparison.problem or f"in float64, ratio {found} exceeds {allowed}",
        figures={records.BEYOND_ROUNDING: float(loosely.verdict == records.FAIL)},
        failure=None
        if comparison.problem
        else build_failure(observable, got, expected, judged, limit=limit, problem=subject.problem, core={}),
    )
