"""Check `algorithm`: judge what a kernel computes apart from rounding, by evaluating it in float64.

In 16 bits, an error below one rounding passes every comparison: an epsilon in a denominator, a key of little weight that
is dropped, a factor of a gradient. In float64 nothing is left of the roundings, so such an error stands alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from conformance.check_api.judgement import Judgement, format_distinct
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
    cotangent = next((subject.cotangents[name] for name in ("random_lse", "random") if name in subject.cotangents), None)
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
            yield _judge(subject, name, results[name], bounded, judged)
    for gradients in expected.gradients:
        for name, bounded in gradients.items():
            if name in declared.gradients:
                yield _judge(subject, name, results[name], bounded)


def _judge(
    subject: Subject, observable: str, got: np.ndarray, expected: Bounded, judged: np.ndarray | None = None
) -> Judgement:
    """Judge a result by its largest ratio: rounded constants move all elements alike, so their mean says no more."""
    comparison = compare(got, expected, judged)
    limit = subject.limits.limit(subject.case.dtype, observable).ratio
    if comparison.ratio <= limit:
        verdict, reason, failure = records.PASS, "", None
    else:
        verdict = records.FAIL
        found, allowed = format_distinct(comparison.ratio, limit)
        reason = comparison.problem or f"in float64, ratio {found} exceeds {allowed}: it is no rounding"
        failure = build_failure(observable, got, expected, judged, limit=limit, problem=subject.problem, core={})
    return Judgement(
        observable=observable,
        verdict=verdict,
        ratio=comparison.ratio,
        limit=limit,
        worst=comparison.worst,
        reason=reason,
        failure=failure,
    )
