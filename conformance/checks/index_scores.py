"""Check `index_scores`: the scores of the keys that an indexer chooses, and their gradients."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cases.counter_rng import draw_normal
from cases.lightning_mask import Lightning, split_indexer_operands
from conformance.check_api.judgement import Judgement, build_unsupported
from conformance.check_api.subject import Subject
from conformance.executor_tasks import indexer_calls
from conformance.truth.index_score_oracle import compute_index_scores
from conformance.truth.rounding_bounds import Bounded
from reports import records


def check_index_scores(subject: Subject) -> Iterator[Judgement]:
    """Check the scores that an indexer returns for the keys of its lists, and their gradients in q, k and weights."""
    problem = subject.problem
    assert isinstance(problem.mask, Lightning)
    shape = (*problem.q.shape[:2], problem.mask.topk)
    cotangent = draw_normal(subject.case.seed, "index_scores", shape).astype(np.float32)
    got = subject.executor.run(indexer_calls.run_scores, problem, cotangent)
    if got is None:
        yield build_unsupported("scores", "the indexer has no parameter 'return_scores'")
        return
    weights, q, k = split_indexer_operands(problem.q, problem.k)
    indices = np.clip(got["indices"], -1, k.shape[1] - 1)  # `forward` fails a list of other places
    expected = compute_index_scores(q, k, weights, indices, cotangent, subject.case.dtype)
    for name, bounded in expected.items():
        yield _judge(name, got[name], bounded)


def _judge(name: str, got: np.ndarray, expected: Bounded) -> Judgement:
    """Compare with exact values. An error as large as the bound, which is the limit, is a ratio of 1."""
    off = np.abs(got.astype(np.float64) - expected.value)
    judged = np.isfinite(expected.bound)
    is_wrong = judged & ~(off <= expected.bound)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(judged & (off > 0), off / expected.bound, 0)
    ratio = float(np.max(ratios, initial=0))
    if not is_wrong.any():
        return Judgement(observable=name, verdict=records.PASS, ratio=ratio, limit=1.0)
    place = tuple(map(int, np.argwhere(is_wrong)[0]))
    reason = (
        f"{is_wrong.sum()} of {judged.sum()} elements are wrong; {name}{list(place)} is {got[place]:.6g}, "
        f"must be {expected.value[place]:.6g} within {expected.bound[place]:.2g}"
    )
    return Judgement(observable=name, verdict=records.FAIL, ratio=ratio, limit=1.0, reason=reason)
