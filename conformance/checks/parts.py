"""Check `parts`: judge unnormalised attention over all keys, and merged over two pieces of the cache.

A part is `(out, max, sum)`: attention before the division by the sum of weights (docs/contract.md, section 4). It gives
three results. They are `out / sum`, which is attention; `max + log(sum)`, which is `logsumexp`; and `max`, the largest
logit. The check computes them in float64 on the host and judges them by the oracle.

A part is in f32. So its bounds do not include rounding to the operands' dtype, and a part that was stored with fewer
bits fails.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cases.operand_values import Problem
from conformance.check_api.judgement import Judgement, build_unsupported
from conformance.check_api.subject import Subject
from conformance.executor_tasks import single_calls
from conformance.truth.rounding_bounds import Bounded, compute_expectation
from conformance.truth.roundoff import U


class UnnormalizedPart(NamedTuple):
    """An unnormalised part, as host arrays."""

    out: np.ndarray  # the weighted sum of values, [B, T, N, V]
    max: np.ndarray  # the number subtracted from logits, [B, T, N, 1]
    sum: np.ndarray  # the sum of weights, [B, T, N, 1]


def check_parts(subject: Subject) -> Iterator[Judgement]:
    """Check `out / sum`, `max + log(sum)` and `max` of a part, and of merged parts over pieces of the cache."""
    if subject.implementation.parts is None:
        return
    expected = _compute_expectation(subject)
    yield from _judge_part(subject, "part", subject.part, expected)
    pieces = _split_cache(subject.problem)
    if not pieces:
        yield build_unsupported("out.merged", "this case cannot be split into pieces of the cache")
        return
    # A piece may have rows with a sink and no key. They are rare, and a merge must treat them separately. So a case
    # with such rows is always merged, whatever its selection says.
    lone_sink = subject.problem.sinks is not None and any(piece.empty_rows.any() for piece in pieces)
    if not (lone_sink or subject.selection.merges):
        return
    piece_parts = [subject.executor.part(piece) for piece in pieces]
    yield from _judge_part(subject, "merged", _merge_parts(subject, piece_parts), expected)


def _merge_parts(subject: Subject, parts: Sequence[Any]) -> Any:
    """Merge parts by the implementation's own merge, or by the contract's formula if it has none."""
    if subject.implementation.merge is not None:
        return subject.executor.run(single_calls.merge_parts, list(parts))
    arrays = [UnnormalizedPart(*(np.asarray(x, np.float64) for x in part)) for part in parts]
    top = np.max([np.where(part.sum > 0, part.max, -np.inf) for part in arrays], axis=0)
    weights = [
        np.exp(np.where(part.sum > 0, part.max - np.where(np.isfinite(top), top, 0), -np.inf)) for part in arrays
    ]
    sums = (
        np.sum([w * getattr(part, name) for w, part in zip(weights, arrays, strict=True)], axis=0)
        for name in ("out", "sum")
    )
    out, total = (x.astype(np.float32) for x in sums)
    return UnnormalizedPart(out, top.astype(np.float32), total)


def _compute_expectation(subject: Subject) -> Mapping[str, Bounded]:
    """Compute the expected `out`, `logsumexp` and `max_logits` of a part; here `max_logits` includes the sink."""
    problem, implementation = subject.problem, subject.implementation
    forward = compute_expectation(problem, implementation.arithmetic, empty_rows="zero", rounds_out=False).forward
    top = forward["max_logits"]
    if problem.sinks is None:
        return forward
    sinks = np.broadcast_to(problem.sinks.astype(np.float64)[:, None], top.value.shape)
    higher = sinks > top.value
    bounded = Bounded(
        np.where(higher, sinks, top.value), np.where(higher, np.maximum(top.bound, U * np.abs(sinks)), top.bound)
    )
    return {**forward, "max_logits": bounded}


def _judge_part(subject: Subject, how: str, part: Any, expected: Mapping[str, Bounded]) -> Iterator[Judgement]:
    """Judge the three results of a part; `how` says in the observables how the part was computed."""
    malformation = _find_malformation(subject.problem, part)
    values: dict[str, np.ndarray] = {}
    if not malformation:
        out, top, total = (np.asarray(x, np.float64) for x in part)
        nonempty = total != 0
        with np.errstate(divide="ignore", invalid="ignore"):
            values["out"] = np.where(nonempty | (out != 0), out / total, 0.0)
            values["logsumexp"] = np.where(nonempty, top + np.log(total), -np.inf)[..., 0].swapaxes(1, 2)
        values["max_logits"] = top[..., 0].swapaxes(1, 2)
    for name, label in (("out", "out"), ("logsumexp", "logsumexp"), ("max_logits", "max")):
        if malformation:
            yield subject.judge_malformed(name, malformation, label=f"{label}.{how}")
        else:
            yield subject.judge(name, values[name], expected[name], label=f"{label}.{how}")


def _find_malformation(problem: Problem, part: Any) -> str:
    """Describe a wrong type, shape or dtype of a part; return "" if all are right."""
    if not (isinstance(part, tuple | list) and len(part) == 3):
        return f"a part must be (out, max, sum), got {type(part).__name__}"
    rows = problem.q.shape[:3]
    for name, array, depth in zip(UnnormalizedPart._fields, part, (problem.v.shape[3], 1, 1), strict=True):
        if np.shape(array) != (*rows, depth):
            return f"{name} of a part must have shape {(*rows, depth)}, got {np.shape(array)}"
        if array.dtype != np.float32:
            return f"{name} of a part must be float32, got {array.dtype}"
    return ""


def _split_cache(problem: Problem) -> list[Problem]:
    """Split the keys into two cache pieces, of which the second has the sink; return [] if that is impossible."""
    kv_length = problem.k.shape[1]
    cut = problem.mask.key_step or (kv_length + 1) // 2
    # The call `parts` takes none of these operands (docs/contract.md, section 4).
    if problem.bias is not None or problem.segment_ids is not None or problem.is_positional or problem.head_factors:
        return []
    if cut >= kv_length:
        return []
    before, after = problem.mask.select_keys(0, cut), problem.mask.select_keys(cut, kv_length)
    if before is None or after is None:
        return []
    return [
        dataclasses.replace(problem, k=problem.k[:, :cut], v=problem.v[:, :cut], mask=before, sinks=None),
        dataclasses.replace(problem, k=problem.k[:, cut:], v=problem.v[:, cut:], mask=after),
    ]
