"""Independence: what a result may not depend on can change freely, and the result keeps its bits.

No oracle is needed. One part of the problem is kept: a batch row, a key/value head with its query heads, and a range of
queries with the keys that they may attend to. Everything else gets other values. In the part itself every operation has
the operands that it had, in the order that it had, so the results must be the same to the bit.

Where queries choose their keys (`cases.moba_mask`) that is not so. A kernel gathers the queries that chose the same chunk in
one block. What other queries choose thus moves a query to another row of a matrix product, and on CPU the last bit of
such a product depends on the row. There the results must be as right as they were.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from cases import quantization
from cases.moba_mask import depends_on_data
from cases.operand_values import Cotangent, Problem
from conformance import records
from conformance.check_api.judgement import Judgement
from conformance.check_api.subject import Subject
from conformance.execution.executor import Result
from conformance.records import Worst
from conformance.truth.rounding_bounds import Bounded


@dataclasses.dataclass(frozen=True)
class _Part:
    """A batch row, a key/value head with its query heads, and a range of queries."""

    name: str
    batch: int
    kv_head: int
    heads: slice
    rows: slice


def check_independence(subject: Subject) -> Iterator[Judgement]:
    """Other batch rows, other heads and keys that a query may not attend to change no bit of its results."""
    if "independence" not in subject.rotation.laws:
        return
    clean = _run_call(subject, subject.problem)
    for part in _build_parts(subject.problem):
        changed = _change_elsewhere(subject.problem, part, keys=True)
        if changed is None:
            continue
        got = _run_call(subject, changed)
        for name in clean.values:
            if depends_on_data(subject.problem.mask):
                yield _judge_accuracy(subject, part, name, got)
            else:
                before, after = (_select_part(name, result, part, subject) for result in (clean, got))
                yield _judge_bits(subject, part, name, before, after)
    if subject.has_gradients:
        yield from _check_gradients(subject)


def _check_gradients(subject: Subject) -> Iterator[Judgement]:
    part = _build_parts(subject.problem)[0]
    changed = _change_elsewhere(subject.problem, part, keys=False)
    if changed is None:
        return
    cotangent = subject.cotangents[subject.full_cotangent]
    clean = subject.gradients(subject.full_cotangent)
    got = subject.run_gradients(changed, _change_cotangent_elsewhere(cotangent, part))
    for name in ("dq", "dk", "dv"):
        if name in subject.implementation.gradients:
            heads = part.heads if name == "dq" else part.kv_head
            before, after = (result.values[name][part.batch, :, heads] for result in (clean, got))
            yield _judge_bits(subject, part, name, before, after)


def _run_call(subject: Subject, problem: Problem) -> Result:
    """The call with residuals if there are any."""
    if subject.implementation.residuals:
        return subject.require_shapes(
            subject.residuals if problem is subject.problem else subject.run_residuals(problem)
        )
    return subject.require_shapes(subject.forward if problem is subject.problem else subject.executor.forward(problem))


def _build_parts(problem: Problem) -> tuple[_Part, _Part]:
    batch, q_length, num_q_heads, _ = problem.q.shape
    num_kv_heads = problem.k.shape[2]
    group, half = num_q_heads // num_kv_heads, (q_length + 1) // 2
    last = num_kv_heads - 1
    return (
        _Part("first", 0, 0, slice(0, group), slice(0, half)),
        _Part("last", batch - 1, last, slice(last * group, num_q_heads), slice(q_length - half, q_length)),
    )


def _change_elsewhere(problem: Problem, part: _Part, *, keys: bool) -> Problem | None:
    """The problem with other values outside the part; with `keys`, in keys that its queries may not attend to too.

    None if there is nothing else.
    """
    q, k, v = (x.copy() for x in (problem.q, problem.k, problem.v))
    q_here = np.zeros(q.shape[:3], bool)
    q_here[part.batch, :, part.heads] = True
    v_here = np.zeros(k.shape[:3], bool)
    v_here[part.batch, :, part.kv_head] = True
    k_here = v_here.copy()
    if keys:
        q_here[part.batch, :, part.heads] = False
        q_here[part.batch, part.rows, part.heads] = True
        allowed = np.broadcast_to(problem.allowed, (*q.shape[:1], q.shape[2], q.shape[1], k.shape[1]))
        attended = allowed[part.batch, part.heads, part.rows].any(axis=(0, 1))
        v_here[part.batch, :, part.kv_head] = attended
        k_here[part.batch, :, part.kv_head] = attended | problem.choosing[0, 0, part.rows].any(axis=0)
        if problem.storage is not None:  # what the part reads may lie where others read it too
            v_here, k_here = map(problem.storage.spread_over_shared, (v_here, k_here))
    if q_here.all() and v_here.all():
        return None
    if problem.kv_scales is not None and not problem.has_whole_scales:
        k_scales, v_scales = problem.kv_scales
        scales = _replace_scales(k_scales, k_here), _replace_scales(v_scales, v_here)
        problem = dataclasses.replace(problem, kv_scales=scales)
    return dataclasses.replace(
        problem,
        q=np.where(q_here[..., None], q, _replace_values(q)),
        k=np.where(k_here[..., None], k, _replace_values(k)),
        v=np.where(v_here[..., None], v, _replace_values(v)),
    )


def _change_cotangent_elsewhere(cotangent: Cotangent, part: _Part) -> Cotangent:
    out = _replace_values(cotangent.out)
    out[part.batch, :, part.heads] = cotangent.out[part.batch, :, part.heads]
    if cotangent.logsumexp is None:
        return dataclasses.replace(cotangent, out=out)
    lse = _replace_values(cotangent.logsumexp)
    lse[part.batch, part.heads] = cotangent.logsumexp[part.batch, part.heads]
    return dataclasses.replace(cotangent, out=out, logsumexp=lse)


def _replace_values(x: np.ndarray) -> np.ndarray:
    """Finite values of another sign and size: whatever is shared by mistake (a maximum, a scale) shows."""
    limit = quantization.find_largest(x.dtype) or float(np.finfo(np.float16).max if x.dtype == np.float16 else 2.0**60)
    other: np.ndarray = np.clip(-16 * x.astype(np.float64), -limit, limit).astype(x.dtype)
    return other


def _replace_scales(scales: np.ndarray, here: np.ndarray) -> np.ndarray:
    """Other scales `[B or 1, S or 1, K]` for what is nowhere `here [B, S, K]`."""
    shared = tuple(axis for axis, size in enumerate(scales.shape) if size < here.shape[axis])
    return np.where(here.any(axis=shared, keepdims=True), scales, 4 * scales)


def _select_part(name: str, result: Result, part: _Part, subject: Subject) -> np.ndarray:
    """The part's values, zero in rows that may attend to nothing unless those are declared to be zero.

    The mean over all keys depends on all of them.
    """
    live = ~subject.problem.empty_rows | (subject.implementation.empty_rows == "zero")  # [B, N, T]
    if name == "out":
        kept = np.where(live.transpose(0, 2, 1)[..., None], result.values[name], 0)
        return kept[part.batch, part.rows, part.heads]
    kept = np.where(live, result.values[name], 0)
    return kept[part.batch, part.heads, part.rows]


def _judge_accuracy(subject: Subject, part: _Part, name: str, got: Result) -> Judgement:
    """Judgements of the part's results against what is expected of the part, whatever else was changed."""
    place = (part.batch, part.rows, part.heads) if name == "out" else (part.batch, part.heads, part.rows)
    judged = subject.judged_out if name == "out" else subject.judged_residuals
    expected = subject.expectation.forward[name]
    here = Bounded(expected.value[place], expected.bound[place])
    found = subject.judge(name, got.values[name][place], here, judged[place], label=f"{name}.{part.name}")
    if found.verdict != records.FAIL:
        return found
    changed = f"{name} ({_describe_part(part, name)}; the index is within these) when other rows, heads and keys change"
    return dataclasses.replace(found, reason=f"{changed}: {found.reason}")


def _judge_bits(subject: Subject, part: _Part, name: str, before: np.ndarray, after: np.ndarray) -> Judgement:
    same = (before == after) | (np.isnan(before) & np.isnan(after))
    if same.all():
        return Judgement(observable=f"{name}.{part.name}", verdict=records.PASS)
    index = np.unravel_index(int(np.argmin(same)), same.shape)
    return Judgement(
        observable=f"{name}.{part.name}",
        verdict=records.FAIL,
        worst=Worst(tuple(int(n) for n in index), float(after[index]), float(before[index]), 0.0),
        reason=_describe_change(subject.problem, part, name, int(np.sum(~same))),
    )


def _describe_change(problem: Problem, part: _Part, name: str, count: int) -> str:
    batch, _, num_q_heads, _ = problem.q.shape
    others: Mapping[str, bool] = {
        "another batch row": batch > 1,
        "another head": num_q_heads > part.heads.stop - part.heads.start,
        "a key that these queries may not attend to": name in ("out", "logsumexp", "max_logits"),
    }
    return (
        f"{count} values of {name} ({_describe_part(part, name)}; the index is within these) change when only "
        f"{' or '.join(what for what, there in others.items() if there)} changes"
    )


def _describe_part(part: _Part, name: str) -> str:
    place = f"batch {part.batch}, query heads {part.heads.start} to {part.heads.stop - 1}"
    if name in ("out", "logsumexp", "max_logits"):
        place += f", queries {part.rows.start} to {part.rows.stop - 1}"
    return place
