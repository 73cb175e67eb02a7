"""Measure whether a case discriminates: whether simple wrong results would fail it, and by how much.

A test that zeros would pass proves nothing. So the true results of each case are compared with *null results*, which
the oracle computes: zeros, the mean of v, the mask ignored or shifted by one key, the wrong head map, each optional
operand ignored, each gradient doubled. A doubled gradient has the same error as a missing one. If a case has several
cotangents, the one with the largest margin counts.

The *margin* of a null result is the ratio of its worst element, divided by the limit. A case is not used if a null
result has a margin below `REQUIRED_MARGIN`. The smallest margin is exact up to `AMPLE_MARGIN`. Of a null result that
cannot be the weakest, only some heads are computed, so its margin is a lower bound.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from cases.masks import Causal, Dense, Full, Mask
from cases.moba_mask import Moba
from cases.operand_registry import REMOVABLE
from cases.operand_values import Problem
from conformance.check_api.subject import Subject
from conformance.truth import disk_cache, oracle
from conformance.truth.comparison import compare
from conformance.truth.declared_formulas import convert_from_contract
from conformance.truth.rounding_bounds import Bounded

REQUIRED_MARGIN = 1.5
AMPLE_MARGIN = 1e4
"""The margin from which larger ones are not told apart."""
MAX_UNDECIDED_SHARE = 0.1
"""The largest share of undecided rows that a case may have and still be judged.

A row of queries is undecided if rounding could change which keys the query chooses (the gates of a MoBA mask). Such
rows are not judged. While there is one, operands are drawn anew, up to eight times
(`cases.operand_values.draw_problem`). After that no distribution of values has undecided rows, except `huge`: with
gates of 1e5, at least 19% of its rows are undecided. The other rows of such a case are no fair sample: their choices
are easy.
"""


class NullHeadGroup(Protocol):
    """A null result of some heads of one batch row: the part of `oracle.HeadGroup` that is compared."""

    @property
    def batch(self) -> int:
        """Index of the batch row."""

    @property
    def heads(self) -> slice:
        """Indices of the query heads."""

    @property
    def out(self) -> np.ndarray:
        """The null result for `out`, `[G, T, V]`."""

    @property
    def logsumexp(self) -> np.ndarray:
        """The null result for `logsumexp`, `[G, T]`."""


@dataclasses.dataclass(frozen=True)
class _ZeroHeadGroup:
    """The null result of zeros for one head of one batch row."""

    batch: int
    heads: slice
    out: np.ndarray
    logsumexp: np.ndarray


def count_undecided_rows(problem: Problem) -> tuple[int, int]:
    """Return the number of undecided rows of a problem (see `MAX_UNDECIDED_SHARE`), and the number of all rows."""
    return int(np.count_nonzero(~problem.decided)), problem.decided.size


def compute_margins(subject: Subject) -> dict[str, float]:
    """Compute the margin of each null result that differs from the true result on this case. Results are cached.

    Dropout is left out: which weights are dropped is not known before the implementation is called.
    """
    if subject.case.dropout_rate is not None:
        subject = dataclasses.replace(subject, case=dataclasses.replace(subject.case, dropout_rate=None))
    key = (
        "margins",
        (subject.problem, subject.implementation.arithmetic, subject.empty_rows, subject.cotangents),
        subject.implementation.formulas,
        (subject.judged_out, subject.judged_residuals, "logsumexp" in subject.implementation.residuals),
        (subject.case.dtype, subject.limits.limits),
    )
    return disk_cache.compute_cached(key, lambda: _compute_uncached_margins(subject))


def _compute_uncached_margins(subject: Subject) -> dict[str, float]:
    """Compute the margin of each null result, without the cache."""
    margins: dict[str, float] = {}
    for name, null in _iter_forward_nulls(subject.problem):
        enough = min([AMPLE_MARGIN, *margins.values()])
        margins[name] = _compute_forward_margin(subject, null, enough)
    has_choice = _has_choice(subject.problem)
    for expected in subject.expectation.gradients:
        for name, bounded in expected.items():
            if has_choice or name == "dv":
                doubled = compare(2 * bounded.value, bounded).ratio
                margin = doubled / subject.limits.limit(subject.case.dtype, name).ratio
                margins[f"{name}_doubled"] = max(margin, margins.get(f"{name}_doubled", 0.0))
    return margins


def discriminates(subject: Subject) -> bool:
    """Tell whether every null result would fail by at least the required margin."""
    margins = compute_margins(subject)
    return not margins or find_weakest_null(margins)[1] >= REQUIRED_MARGIN


def find_weakest_null(margins: Mapping[str, float]) -> tuple[str, float]:
    """Return the name of the null result with the smallest margin, and the margin."""
    name = min(margins, key=lambda n: margins[n])
    return name, margins[name]


def _compute_forward_margin(subject: Subject, null: Iterable[NullHeadGroup], enough: float) -> float:
    """Compute the margin of a null result: the larger one of `out` and, where it is returned, `logsumexp`.

    Stop at the first head group whose margin is at least `enough`.
    """
    expected, limit = subject.expectation.forward, subject.limits.limit
    dtype, formulas = subject.case.dtype, subject.implementation.formulas
    limits = {name: limit(dtype, name).ratio for name in ("out", "logsumexp")}
    judged_out = np.broadcast_to(subject.judged_out, expected["out"].value.shape)
    # The null result has the sink in its `logsumexp`, so it cannot be compared with one without.
    is_comparable = formulas.logsumexp_sink or subject.problem.sinks is None
    compares_logsumexp = "logsumexp" in subject.implementation.residuals and is_comparable
    margin = 0.0
    for group in null:
        rows = (group.batch, slice(None), group.heads)
        found = compare(group.out.transpose(1, 0, 2), _select(expected["out"], rows), judged_out[rows])
        margin = max(margin, found.ratio / limits["out"])
        if compares_logsumexp:
            heads = (group.batch, group.heads)
            logsumexp = convert_from_contract(group.logsumexp, formulas)
            found = compare(logsumexp, _select(expected["logsumexp"], heads), subject.judged_residuals[heads])
            margin = max(margin, found.ratio / limits["logsumexp"])
        if margin >= enough:
            break
    return margin


def _select(expected: Bounded, place: tuple[int | slice, ...]) -> Bounded:
    return Bounded(expected.value[place], expected.bound[place])


def _has_choice(problem: Problem) -> bool:
    """Tell whether some query attends to two or more keys, so its softmax is not constant. A sink counts as a key."""
    columns = problem.allowed.sum(axis=-1)
    if problem.sinks is not None:
        columns = np.where(columns > 0, columns + 1, 0)
    return bool(columns.max() > 1)


def _iter_forward_nulls(problem: Problem) -> Iterator[tuple[str, Iterable[NullHeadGroup]]]:
    """Yield the null results of the forward pass, with their names, that differ from this problem's true result."""
    if problem.allowed.any():
        yield "zeros", _iter_zeros(problem)
    if problem.allowed.sum(axis=-1).max() > 1:
        same_keys = problem.resolved_mask
        plain: dict[str, Any] = {operand.name: None for operand in REMOVABLE if operand.name != "segment_ids"}
        flat = dataclasses.replace(problem, mask=same_keys, q=np.zeros_like(problem.q), **plain)
        yield "mean_of_v", oracle.iter_head_groups(flat)
    for name, changed in _iter_altered_problems(problem):
        yield name, oracle.iter_head_groups(changed)


def _iter_zeros(problem: Problem) -> Iterator[_ZeroHeadGroup]:
    """Yield `out` and `logsumexp` of zero, head by head."""
    batch, q_length, num_q_heads, _ = problem.q.shape
    for row, head in itertools.product(range(batch), range(num_q_heads)):
        out = np.zeros((1, q_length, problem.v.shape[-1]))
        yield _ZeroHeadGroup(row, slice(head, head + 1), out, out[..., 0])


def _iter_altered_problems(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Yield problems, with their names, that a kernel with a simple mistake would solve in place of this one."""
    q_length, kv_length = problem.q.shape[1], problem.k.shape[1]
    unmasked = dataclasses.replace(problem, mask=Full())
    if (unmasked.allowed != problem.allowed).any():
        yield "mask_ignored", unmasked
    dense = problem.resolved_mask.dense(q_length, kv_length)
    if q_length > 1 and not dense.all():  # with one query, the key that the shift adds or removes may have no weight
        shifted = dataclasses.replace(problem, mask=Dense(np.roll(dense, 1, axis=-1)))
        if not np.array_equal(shifted.allowed, problem.allowed):
            yield "mask_shifted", shifted
    for name, mask in _iter_other_moba_masks(problem.mask):
        other = dataclasses.replace(problem, mask=mask)
        if (other.allowed != problem.allowed).any():
            yield name, other
    if problem.segment_ids is not None:
        alone = dataclasses.replace(problem, segment_ids=None)
        if (alone.allowed != problem.allowed).any():
            yield "segment_ids_ignored", alone
    if (heads := _build_wrong_head_map(problem)) is not None:
        wrong = dataclasses.replace(problem, k=problem.k[:, :, heads], v=problem.v[:, :, heads])
        if problem.kv_scales is not None and not problem.has_whole_scales:
            pairs = {"kv_scales": problem.kv_scales, "kv_zeros": problem.kv_zeros}
            moved: dict[str, Any] = {
                field: tuple(x[:, :, heads] if x.ndim == 4 else x[..., heads] for x in pair)
                for field, pair in pairs.items()
                if pair is not None
            }
            wrong = dataclasses.replace(wrong, **moved)
        yield "wrong_head_map", wrong
    if problem.kv_scales is not None and any((scales.astype(np.float64) != 1).any() for scales in problem.kv_scales):
        k_scales, v_scales = (np.ones_like(scales) for scales in problem.kv_scales)
        yield "kv_scales_ignored", dataclasses.replace(problem, kv_scales=(k_scales, v_scales))
    if problem.kv_zeros is not None:
        k_zeros, v_zeros = map(np.zeros_like, problem.kv_zeros)
        yield "kv_zeros_ignored", dataclasses.replace(problem, kv_zeros=(k_zeros, v_zeros))
    if problem.kv_global_scales is not None:
        yield "kv_global_scales_ignored", dataclasses.replace(problem, kv_global_scales=(1.0, 1.0))
    if problem.q_descale is not None:
        factor = np.repeat(problem.q_descale, problem.q.shape[2] // problem.k.shape[2], axis=1)[:, None, :, None]
        yield "q_descale_ignored", dataclasses.replace(problem, q=(problem.q / factor).astype(problem.q.dtype))
    if problem.q_scale is not None:
        yield "q_scale_ignored", dataclasses.replace(problem, q=(problem.q / problem.q_scale).astype(problem.q.dtype))
    for operand in REMOVABLE:
        if operand.name != "segment_ids" and getattr(problem, operand.name) is not None:
            yield f"{operand.name}_ignored", problem.without(operand.name)


def _iter_other_moba_masks(mask: Mask) -> Iterator[tuple[str, Mask]]:
    """Yield MoBA masks that choose other chunks of keys: all of them, only the query's own, or one chunk more."""
    if isinstance(mask, Moba):
        yield "gates_ignored", Causal(mask.offset)
        yield "own_chunk_only", dataclasses.replace(mask, topk=1)
        yield "one_chunk_more", dataclasses.replace(mask, topk=mask.topk + 1)


def _build_wrong_head_map(problem: Problem) -> np.ndarray | None:
    """Return a wrong key/value head for each query head, as an array `[N]`; None if there is one key/value head.

    If query heads share key/value heads, groups are interleaved; otherwise heads are rotated by one.
    """
    num_q_heads, num_kv_heads = problem.q.shape[2], problem.k.shape[2]
    if num_kv_heads == 1:
        return None
    heads = np.arange(num_q_heads)
    return heads % num_kv_heads if num_kv_heads < num_q_heads else np.roll(heads, 1)
