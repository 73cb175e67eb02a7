"""Check `independence`: a result keeps its bits when inputs that it must not depend on change.

No oracle is needed. The check first repeats the call on the same operands (`repeated_calls`). A result that changes by
that alone is a finding of its own, and is compared within its bounds from there on.

Then the check makes another call, in which one region of the problem is unchanged: a batch row, a key/value head with
  its
query heads, and a range of queries with the keys that they may attend to. Everything else gets other values. Within the
region every operation has the same operands in the same order, so the region's results must be equal to the bit.

If queries choose their keys (`cases.moba_mask`), results need not be equal to the bit. A kernel gathers the queries
that chose the same chunk in one block. So the choices of other queries move a query to another row of a matrix product,
and on CPU the last bit of such a product depends on the row. For such masks the results must only stay within their
bounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from cases import quantization
from cases.moba_mask import depends_on_data
from cases.operand_values import Cotangent, Problem
from conformance.check_api.judgement import Judgement
from conformance.check_api.subject import Subject
from conformance.checks import repeated_calls
from conformance.execution.executor import Result, Values
from conformance.truth.rounding_bounds import Bounded
from reports import records
from reports.records import Worst


@dataclasses.dataclass(frozen=True)
class _Region:
    """The region of a problem that stays unchanged: a batch row, a key/value head, its query heads, and some queries.

    Attributes:
      name: the name of the region, the last word of the names of judgements such as `out.first`.
      batch: the index of the batch row.
      kv_head: the index of the key/value head.
      heads: the query heads that read this key/value head.
      rows: the range of queries.
    """

    name: str
    batch: int
    kv_head: int
    heads: slice
    rows: slice

    def locate(self, name: str) -> tuple[int, slice, slice]:
        """Return the region's index into the result `name`."""
        return (self.batch, self.rows, self.heads) if name == "out" else (self.batch, self.heads, self.rows)


def check_independence(subject: Subject) -> Iterator[Judgement]:
    """Check that other batch rows, other heads and hidden keys change no bit of a result."""
    if "independence" not in subject.selection.laws:
        return
    clean = _run_call(subject, subject.problem)
    names = tuple(clean.values)
    live = {name: _select_live(name, clean, subject) for name in names}
    changes = _repeat_call(subject, live)
    judgements = []
    for region in _build_regions(subject.problem):
        changed = _change_elsewhere(subject.problem, region, keys=True)
        if changed is None:
            continue
        got = _run_call(subject, changed)
        for name in names:
            if depends_on_data(subject.problem.mask):
                judgements.append(_judge_accuracy(subject, region, name, got))
                continue
            before, after = (_select_region(name, result, region, subject) for result in (clean, got))
            judgement = _judge_bits(subject, region, name, before, after)
            if judgement.verdict == records.FAIL and name not in changes:
                changes = {**changes, **_repeat_call(subject, live, repeated_calls.TRIES_BEFORE_BLAME)}
            judgements.append(_judge_accuracy(subject, region, name, got) if name in changes else judgement)
    for name in names:
        bound = subject.expectation.forward[name].bound
        yield repeated_calls.judge_repetition(name, live[name], changes, bound)
    yield from judgements
    if subject.has_gradients:
        yield from _check_gradients(subject)


def _repeat_call(subject: Subject, live: Values, tries: int = 1) -> Values:
    """Repeat the call on the case's own operands, and return the results in live rows that change."""

    def repeat() -> Values:
        problem = subject.problem
        again = subject.run_residuals(problem) if subject.implementation.residuals else subject.run_forward(problem)
        return {name: _select_live(name, again, subject) for name in live}

    return repeated_calls.find_changes(live, repeat, tuple(live), tries=tries)


def _check_gradients(subject: Subject) -> Iterator[Judgement]:
    """Check that the same call gives the same gradients, and that other batch rows and heads change no bit of them."""
    region = _build_regions(subject.problem)[0]
    cotangent = subject.cotangents[subject.full_cotangent]
    clean, exact = subject.gradients(subject.full_cotangent), subject.get_expected_gradients(subject.full_cotangent)
    unordered = subject.implementation.unordered_sums
    names = [name for name in ("dq", "dk", "dv") if name in subject.implementation.gradients]
    ordered = [name for name in names if name not in unordered]

    def repeat() -> Values:
        return subject.run_gradients(subject.problem, cotangent).values

    changes = repeated_calls.find_changes(clean.values, repeat, ordered) if ordered else {}
    changed = _change_elsewhere(subject.problem, region, keys=False)
    judgements = []
    if changed is not None:
        got = subject.run_gradients(changed, _change_cotangent_elsewhere(cotangent, region))
        for name in names:
            heads = region.heads if name == "dq" else region.kv_head
            before, after = (result.values[name][region.batch, :, heads] for result in (clean, got))
            judgement = _judge_bits(subject, region, name, before, after)
            if judgement.verdict == records.FAIL and name in ordered and name not in changes:
                tries = repeated_calls.TRIES_BEFORE_BLAME
                changes = {**changes, **repeated_calls.find_changes(clean.values, repeat, ordered, tries=tries)}
            if name in unordered or name in changes:
                both = Bounded(before.astype(np.float64), 2 * exact[name].bound[region.batch, :, heads])
                judgement = subject.judge(name, after, both, label=f"{name}.{region.name}")
            judgements.append(judgement)
    for name in ordered:
        yield repeated_calls.judge_repetition(name, clean.values[name], changes, exact[name].bound)
    yield from judgements


def _run_call(subject: Subject, problem: Problem) -> Result:
    """Run the call with residuals if the implementation offers any, else the call without."""
    if subject.implementation.residuals:
        return subject.require_shapes(
            subject.residuals if problem is subject.problem else subject.run_residuals(problem)
        )
    return subject.require_shapes(subject.forward if problem is subject.problem else subject.run_forward(problem))


def _build_regions(problem: Problem) -> tuple[_Region, _Region]:
    """Return two regions: the first batch row, head and half of the queries, and the last row, head and half."""
    batch, q_length, num_q_heads, _ = problem.q.shape
    num_kv_heads = problem.k.shape[2]
    group, half = num_q_heads // num_kv_heads, (q_length + 1) // 2
    last = num_kv_heads - 1
    return (
        _Region("first", 0, 0, slice(0, group), slice(0, half)),
        _Region("last", batch - 1, last, slice(last * group, num_q_heads), slice(q_length - half, q_length)),
    )


def _change_elsewhere(problem: Problem, region: _Region, *, keys: bool) -> Problem | None:
    """Return the problem with other values outside the region; None if nothing is outside.

    With `keys`, the region ends at its queries `region.rows` and the keys that they may attend to. Other queries and
    keys of the same batch row and head are changed too. Without, all queries and keys of that row and head are
    unchanged.
    """
    q, k, v = (x.copy() for x in (problem.q, problem.k, problem.v))
    q_kept = np.zeros(q.shape[:3], bool)
    q_kept[region.batch, :, region.heads] = True
    v_kept = np.zeros(k.shape[:3], bool)
    v_kept[region.batch, :, region.kv_head] = True
    k_kept = v_kept.copy()
    if keys:
        q_kept[region.batch, :, region.heads] = False
        q_kept[region.batch, region.rows, region.heads] = True
        allowed = np.broadcast_to(problem.allowed, (*q.shape[:1], q.shape[2], q.shape[1], k.shape[1]))
        attended = allowed[region.batch, region.heads, region.rows].any(axis=(0, 1))
        v_kept[region.batch, :, region.kv_head] = attended
        k_kept[region.batch, :, region.kv_head] = attended | problem.choosing[0, 0, region.rows].any(axis=0)
        if problem.storage is not None:  # sequences may share stored tokens, so these are unchanged too
            v_kept, k_kept = map(problem.storage.spread_over_shared, (v_kept, k_kept))
    if q_kept.all() and v_kept.all():
        return None
    if problem.kv_scales is not None and not problem.has_whole_scales:
        k_scales, v_scales = problem.kv_scales
        k_used = k_kept
        if problem.kv_zeros is not None:  # all keys of a page share theirs
            assert problem.storage is not None
            k_used = ~quantization.reduce_pages(~k_kept, problem.storage.held.shape[1])
            k_zeros, v_zeros = problem.kv_zeros
            zeros = _replace_scales(k_zeros, k_used), _replace_scales(v_zeros, v_kept)
            problem = dataclasses.replace(problem, kv_zeros=zeros)
        scales = _replace_scales(k_scales, k_used), _replace_scales(v_scales, v_kept)
        problem = dataclasses.replace(problem, kv_scales=scales)
    return dataclasses.replace(
        problem,
        q=np.where(q_kept[..., None], q, _replace_values(q)),
        k=np.where(k_kept[..., None], k, _replace_values(k)),
        v=np.where(v_kept[..., None], v, _replace_values(v)),
    )


def _change_cotangent_elsewhere(cotangent: Cotangent, region: _Region) -> Cotangent:
    """Return the cotangent with other values outside the region's batch row and heads."""
    out = _replace_values(cotangent.out)
    out[region.batch, :, region.heads] = cotangent.out[region.batch, :, region.heads]
    if cotangent.logsumexp is None:
        return dataclasses.replace(cotangent, out=out)
    lse = _replace_values(cotangent.logsumexp)
    lse[region.batch, region.heads] = cotangent.logsumexp[region.batch, region.heads]
    return dataclasses.replace(cotangent, out=out, logsumexp=lse)


def _replace_values(x: np.ndarray) -> np.ndarray:
    """Return `-16 * x`, clipped to the dtype's range, so that a wrongly shared maximum or scale shows."""
    limit = quantization.find_largest(x.dtype) or float(np.finfo(np.float16).max if x.dtype == np.float16 else 2.0**60)
    if x.dtype == np.uint8:
        return 255 - x
    other: np.ndarray = np.clip(-16 * x.astype(np.float64), -limit, limit).astype(x.dtype)
    return other


def _replace_scales(scales: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Multiply by 4 each scale that no token of the region uses.

    `scales` is `[B or 1, S or 1, K]`, `[B, K]` or `[B, S, K, blocks]`. `used [B, S, K]` marks the tokens of the region.
    """
    if scales.ndim == 4:  # of blocks or channels
        largest = quantization.find_largest(scales.dtype) or np.inf
        other = np.minimum(4 * scales.astype(np.float64), largest).astype(scales.dtype)
        return np.where(used[..., None], scales, other)
    if scales.ndim == 2:
        return np.where(used.any(axis=1), scales, 4 * scales)
    shared = tuple(axis for axis, size in enumerate(scales.shape) if size < used.shape[axis])
    return np.where(used.any(axis=shared, keepdims=True), scales, 4 * scales)


def _select_region(name: str, result: Result, region: _Region, subject: Subject) -> np.ndarray:
    """Select the region's results, with zeros in empty rows unless the kernel declares that it returns zero there.

    An empty row may hold the mean over all keys. It depends on all of them, so it is not compared.
    """
    return _select_live(name, result, subject)[region.locate(name)]


def _select_live(name: str, result: Result, subject: Subject) -> np.ndarray:
    """Return a forward result with zeros in empty rows, unless the kernel declares that it returns zero there."""
    live = ~subject.problem.empty_rows | (subject.implementation.empty_rows == "zero")  # [B, N, T]
    return np.where(live.transpose(0, 2, 1)[..., None] if name == "out" else live, result.values[name], 0)


def _judge_accuracy(subject: Subject, region: _Region, name: str, got: Result) -> Judgement:
    """Judge the region's results in `got`, the result of the changed problem, by the oracle."""
    place, label = region.locate(name), f"{name}.{region.name}"
    judged = subject.judged_out if name == "out" else subject.judged_residuals
    expected = subject.expectation.forward[name]
    bounds = Bounded(expected.value[place], expected.bound[place])
    judgement = subject.judge(name, got.values[name][place], bounds, judged[place], label=label)
    if judgement.verdict != records.FAIL:
        return judgement
    changed = f"{name} ({_describe_region(region, name)}; the index is within these)"
    reason = f"{changed} when other rows, heads and keys change: {judgement.reason}"
    return dataclasses.replace(judgement, reason=reason)


def _judge_bits(subject: Subject, region: _Region, name: str, before: np.ndarray, after: np.ndarray) -> Judgement:
    """Judge whether two results of the region have the same bits."""
    same = repeated_calls.find_equal(before, after)
    if same.all():
        return Judgement(observable=f"{name}.{region.name}", verdict=records.PASS)
    index = np.unravel_index(int(np.argmin(same)), same.shape)
    return Judgement(
        observable=f"{name}.{region.name}",
        verdict=records.FAIL,
        worst=Worst(tuple(int(n) for n in index), float(after[index]), float(before[index]), 0.0),
        reason=_describe_change(subject.problem, region, name, int(np.sum(~same))),
    )


def _describe_change(problem: Problem, region: _Region, name: str, count: int) -> str:
    """Describe which inputs were changed and how many results changed with them."""
    batch, _, num_q_heads, _ = problem.q.shape
    changed: Mapping[str, bool] = {
        "another batch row": batch > 1,
        "another head": num_q_heads > region.heads.stop - region.heads.start,
        "a key that these queries may not attend to": name in ("out", "logsumexp", "max_logits"),
    }
    return (
        f"{count} values of {name} ({_describe_region(region, name)}; the index is within these) change when only "
        f"{' or '.join(what for what, is_changed in changed.items() if is_changed)} changes"
    )


def _describe_region(region: _Region, name: str) -> str:
    """Describe the batch row, heads and queries of the region that a result covers."""
    place = f"batch {region.batch}, query heads {region.heads.start} to {region.heads.stop - 1}"
    if name in ("out", "logsumexp", "max_logits"):
        place += f", queries {region.rows.start} to {region.rows.stop - 1}"
    return place
