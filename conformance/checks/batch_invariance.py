"""Check `batch_invariance`: the bits of a sequence's results do not depend on the other sequences of the call.

The check makes the call of its case, then calls with some of its sequences (`cases.batch_cases`), and compares the
results of each sequence bit by bit. No oracle is needed. For a kernel that does not declare `batch_invariant`, nothing
fails, and a note says what differs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from cases.batch_cases import FOLLOWED, SharedCall, find_obstacle, list_shared_calls, share_case, share_problem
from conformance.check_api.judgement import Judgement, build_unsupported
from conformance.check_api.subject import Subject
from conformance.checks import repeated_calls
from conformance.execution.executor import Values
from reports import records
from reports.records import Worst

_QUERY_AXIS = {"out": 1, "dq": 1, "logsumexp": 2, "max_logits": 2}


def check_batch_invariance(subject: Subject) -> Iterator[Judgement]:
    """Check that a sequence has the same bits alone, with others, elsewhere, padded and in chunks, if declared."""
    if (reason := find_obstacle(subject.case)) is not None:
        yield build_unsupported("all", reason)
        return
    whole = _run_call(subject, None)
    for call in list_shared_calls(subject.case):
        shared, _ = share_case(subject.case, call)
        if (reason := subject.implementation.supports(shared)) is not None:
            yield build_unsupported(call.name, reason)
            continue
        got = _run_call(subject, call)
        for name in whole:
            yield _compare_sequences(subject, call, name, whole, got[name])


def _run_call(subject: Subject, call: SharedCall | None) -> Values:
    """Return the compared results of a shared call, or of the whole case."""
    case, whole = subject.case, subject.problem
    problem = whole if call is None else share_problem(case, whole, call)
    results = dict(subject.run_results(problem))
    if subject.has_gradients:
        cotangent = subject.cotangents[subject.full_cotangent]
        if call is not None:
            rows, queries = list(call.rows), share_case(case, call)[1]
            lse = None if cotangent.logsumexp is None else cotangent.logsumexp[rows][:, :, queries]
            cotangent = dataclasses.replace(cotangent, out=cotangent.out[rows][:, queries], logsumexp=lse)
        names = ("dq",) if whole.storage is not None else ("dq", "dk", "dv")
        offered = subject.implementation.gradients - set(subject.implementation.unordered_sums)
        gradients = subject.run_gradients(problem, cotangent).values
        results |= {name: gradients[name] for name in names if name in offered}
    return results


def _compare_sequences(subject: Subject, call: SharedCall, name: str, whole: Values, got: np.ndarray) -> Judgement:
    """Compare the bits of one result of all sequences of a shared call with those of the whole case."""
    expected = whole[name][list(call.rows)]
    if name in _QUERY_AXIS:
        queries = share_case(subject.case, call)[1]
        expected = expected[(slice(None),) * _QUERY_AXIS[name] + (queries,)]
        empty = subject.problem.empty_rows[list(call.rows)][:, :, queries]
        if name != "dq" and subject.implementation.empty_rows != "zero":
            empty = empty.transpose(0, 2, 1)[..., None] if name == "out" else empty
            got, expected = (np.where(empty, 0, x) for x in (got, expected))
    same = repeated_calls.find_equal(expected, got)
    label = f"{name}.{call.name}"
    if same.all():
        return Judgement(observable=label, verdict=records.PASS)
    reason = _describe_difference(call, name, expected, got, same)
    if not subject.implementation.batch_invariant:
        figures = {"differing_elements": float(np.sum(~same))}
        reason = f"batch_invariant is not declared: {reason}"
        return Judgement(observable=label, verdict=records.PASS, reason=reason, figures=figures)
    again = repeated_calls.find_changes(
        whole, lambda: _run_call(subject, None), (name,), tries=repeated_calls.TRIES_BEFORE_BLAME
    )
    if again:
        reason += "; the same call gives other bits too when it is made again"
    index = tuple(int(n) for n in np.unravel_index(int(np.argmin(same)), same.shape))
    worst = Worst(index, float(got[index]), float(expected[index]), 0.0)
    return Judgement(observable=label, verdict=records.FAIL, worst=worst, reason=reason)


def _describe_difference(call: SharedCall, name: str, expected: np.ndarray, got: np.ndarray, same: np.ndarray) -> str:
    """Describe how many bits of which sequence differ, the followed one if its bits do."""
    differing = [n for n in range(len(call.rows)) if not same[n].all()]
    place = next((n for n in differing if call.rows[n] == FOLLOWED), differing[0])
    with np.errstate(invalid="ignore"):
        off = np.abs(got[place].astype(np.float64) - expected[place].astype(np.float64))
    off = np.where(same[place], 0.0, np.where(np.isnan(off), np.inf, off))
    index = tuple(int(n) for n in np.unravel_index(int(np.argmax(off)), off.shape))
    largest = float(off[index])
    size = f"about 2^{round(math.log2(largest))}" if 0 < largest < math.inf else f"{largest:g}"
    others = f"; so do those of {len(differing) - 1} other sequences" if len(differing) > 1 else ""
    return (
        f"bits of {name} of sequence {call.rows[place]} differ when {call.change}: {int(np.sum(~same[place])):,} of "
        f"{same[place].size:,} elements, largest difference {size} at {list(index)}{others}"
    )
