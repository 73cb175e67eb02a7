"""Build the cases of the check `batch_invariance`, and the other calls in which the sequences of a case take part.

The sequences of a case are its batch rows. In another call some of them come alone, with others, in another order, in
other pages, with more room behind their keys, or with their queries in chunks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cases import mask_spec
from cases.case import Case
from cases.grid import Supports
from cases.operand_values import Problem
from cases.storage_forms.form_registry import FORMS

FOLLOWED = 0
"""The sequence that takes part in every call."""
_SHARING = {"two": 2, "seven": 7}
_ROOM = 72  # keys of padding, more than a usual block of 64
_PADDING = 2.0**6  # what keys of padding hold: finite, so that a kernel may read it, and no mask lets a query see it
_SHORT, _LONG = 40, 2200  # a prompt, and a cache that kernels for one query split
_ROW_TERMS = ("lengths", "own")  # masks with a number for each sequence
_SHIFTED_TERMS = ("causal", "window")  # masks whose last argument is the position of the first query
_HEADS: tuple[dict[str, int], ...] = ({"num_q_heads": 4, "num_kv_heads": 2}, {}, {"head_dim": 128, "v_head_dim": 128})
_LEFTS = ("inf", "31")
_SIZES: dict[str, int | None] = {"packed": None, "paged": 16, "latent": None, "latent_pages": 16, "ring": 64}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedCall:
    """A call of some sequences of a case.

    Attributes:
      name: the last word of the names of judgements.
      change: what differs from the call of the whole case, after "when".
      rows: the sequences, in order.
      start: the first query along T; None for all.
      stop: one past the last query along T; None for all.
      room: the number of keys of padding.
      seed: added to the seed, which decides which pages are used.
    """

    name: str
    change: str
    rows: tuple[int, ...]
    start: int | None = None
    stop: int | None = None
    room: int = 0
    seed: int = 0


def select_batch_cases(
    storage: str | None, lengths: Sequence[int] = (), seed: int = 0, supports: Supports = lambda case: None
) -> tuple[Case, ...]:
    """Select the cases of kernels that take operands in a storage form: few queries and many, few keys and many.

    Args:
      storage: the name of the storage form; None for dense operands.
      lengths: numbers of keys from which the kernel splits them. A case goes beyond each.
    """
    fields = _list_dense_fields if storage in (None, "latent") else _list_stored_fields
    found = []
    for candidates in fields(storage, (_LONG, *(n + n // 4 for n in lengths))):
        cases = (
            Case(**{**one, **heads, **_find_tied_heads(storage), "dtype": dtype, "seed": seed})
            for one in candidates
            for dtype in ("f32", "bf16")
            for heads in _HEADS
        )
        found += [next((case for case in cases if supports(case) is None), None)]
    return tuple(dict.fromkeys(case for case in found if case is not None))


def _find_tied_heads(storage: str | None) -> dict[str, int]:
    return {"num_kv_heads": 1} if storage is not None and FORMS[storage].is_tied else {}


def _list_dense_fields(storage: str | None, lengths: Sequence[int]) -> Iterator[tuple[dict[str, Any], ...]]:
    """List the fields of dense cases; of each entry, the first that a kernel supports is used."""
    prompt = {"q_length": _SHORT, "kv_length": _SHORT, "mask": "causal", "storage": storage}
    yield ({**prompt, "phase": "train", "batch": 7},)
    yield tuple({**prompt, "phase": "prefill", "batch": batch} for batch in (64, 7))
    for length in lengths:
        token = {"q_length": 1, "kv_length": length, "phase": "decode", "batch": 7, "storage": storage}
        ends = "-".join(map(str, _spread_lengths(7, length)))
        yield tuple({**token, "mask": mask} for mask in (f"lengths-{ends}", f"causal-o{length - 1}", "full"))


def _list_stored_fields(storage: str | None, lengths: Sequence[int]) -> Iterator[tuple[dict[str, Any], ...]]:
    """List the fields of cases in packs, pages or rings."""
    form = FORMS[storage or ""]
    phases = ("prefill",) if form.is_cache else ("train", "prefill")
    for phase in phases:
        ends = _spread_lengths(7, 2 * _SHORT)
        queries = ends if form.has_q_lengths else (min(ends),) * 7
        fields = {"phase": phase, "batch": 7, "q_length": max(queries), "kv_length": 2 * _SHORT}
        stored = form.format(_SIZES[form.name], queries)
        yield tuple({**fields, "mask": _join_own(left, ends), "storage": stored} for left in _LEFTS)
    for batch, length in ((64, 2 * _SHORT), *((7, n) for n in lengths)):
        ends = _spread_lengths(batch, length)
        fields = {"phase": "decode", "batch": batch, "q_length": 1, "kv_length": length}
        stored = form.format(_SIZES[form.name], (1,) * batch)
        yield tuple({**fields, "mask": _join_own(left, ends), "storage": stored} for left in _LEFTS)


def _join_own(left: str, ends: Sequence[int]) -> str:
    return f"own-l{left}-{'-'.join(map(str, ends))}"


def _spread_lengths(count: int, longest: int) -> tuple[int, ...]:
    """Return lengths from a third of `longest` on; the followed sequence has two thirds, and the last is the longest.

    They end at many places of a block.
    """
    rest = (longest - 1 - (37 * n * longest // 40) % (2 * longest // 3) for n in range(1, count - 1))
    return (2 * longest // 3 + 1, *rest, longest)


def find_obstacle(case: Case) -> str | None:
    """Return why the sequences of a case cannot take part in other calls, or None if they can."""
    names = {name for name, _ in _iter_terms(case)}
    if case.batch < 2:
        return "the case has one sequence"
    if "_or_" in case.mask or "_at-" in case.mask or names - {*_ROW_TERMS, *_SHIFTED_TERMS, "full"}:
        return f"the mask {case.mask} is no window or length of each sequence"
    if case.alibi or case.score is not None:
        return "an operand depends on the positions of queries and keys"
    if (spec := case.stored) is not None and spec.shared:
        return "sequences share pages"
    return None


def list_shared_calls(case: Case) -> Iterator[SharedCall]:
    """List the other calls in which the sequences of a case take part."""
    rows = tuple(range(case.batch))
    yield SharedCall(name="alone", change=f"it is alone and not one of {case.batch}", rows=(FOLLOWED,))
    for name, count in _SHARING.items():
        if count < case.batch:
            change = f"{count} and not {case.batch} share the call"
            yield SharedCall(name=name, change=change, rows=(*rows[1 - count :], FOLLOWED))
    yield SharedCall(name="order", change="the sequences come in reversed order", rows=rows[::-1])
    if (spec := case.stored) is not None and FORMS[spec.form].unit == "pages":
        yield SharedCall(name="pages", change="the sequences lie elsewhere in memory", rows=rows, seed=1)
    names = {name for name, _ in _iter_terms(case)}
    if names & set(_ROW_TERMS):
        yield SharedCall(name="padded", change=f"{_ROOM} keys of padding are added", rows=rows, room=_ROOM)
    if case.phase != "train" and case.q_lengths[FOLLOWED] > 1 and names <= {"causal", *_ROW_TERMS} != {"lengths"}:
        first, cut = case.q_length - case.q_lengths[FOLLOWED], case.q_length - case.q_lengths[FOLLOWED] * 5 // 8
        for start, stop in ((first, cut), (cut, case.q_length)):
            change = f"queries {start - first} to {stop - first - 1} come in a call of their own"
            yield SharedCall(name=f"chunk{start - first}", change=change, rows=(FOLLOWED,), start=start, stop=stop)


def _iter_terms(case: Case) -> Iterator[tuple[str, tuple[str, ...]]]:
    return (term for group in mask_spec.parse_mask_spec(case.mask) for term in group)


def share_case(case: Case, call: SharedCall) -> tuple[Case, slice]:
    """Return the case of a shared call, and the place of its queries along the axis T of the whole case."""
    stop = case.q_length if call.stop is None else call.stop
    most = max(case.q_lengths[row] for row in call.rows)
    start = stop - most if call.start is None else call.start
    behind = case.q_length - stop
    ends = [case.kv_lengths[row] - behind for row in call.rows]
    terms = []
    for name, arguments in _iter_terms(case):
        if name in _ROW_TERMS:
            sides = (f"{side}{a}" for side, a in zip("lf", arguments[:-1], strict=False) if a)
            terms.append("-".join((name, *sides, *map(str, ends))))
        elif name in _SHIFTED_TERMS:
            sides = (f"{side}{a}" for side, a in zip("lr", arguments[:-1], strict=False))
            offset = int(arguments[-1] or 0) + start
            terms.append("-".join((name, *sides, *((f"o{offset}",) if offset else ()))))
        else:
            terms.append(name)
    storage = case.storage
    if (spec := case.stored) is not None:
        queries = [min(case.q_lengths[row] - behind, stop - start) for row in call.rows]
        storage = FORMS[spec.form].format(spec.size, tuple(queries))
    shared = dataclasses.replace(
        case,
        batch=len(call.rows),
        q_length=stop - start,
        kv_length=max(ends) + call.room,
        mask="_and_".join(_name_lengths(term) for term in terms),
        storage=storage,
        seed=case.seed + call.seed,
    )
    return shared, slice(start, stop)


def _name_lengths(term: str) -> str:
    """Return a term of a mask whose numbers may stand alone, as those of `lengths` do."""
    return f"lengths-{term}" if term[0].isdigit() else term


def share_problem(case: Case, problem: Problem, call: SharedCall) -> Problem:
    """Return the problem of a shared call: some sequences of the case, their operands unchanged."""
    shared, queries = share_case(case, call)

    def fit_keys(x: np.ndarray, axis: int) -> np.ndarray:
        kept = x.take(range(min(x.shape[axis], shared.kv_length)), axis)
        padding = [(0, 0)] * x.ndim
        padding[axis] = (0, shared.kv_length - kept.shape[axis])
        return np.pad(kept, padding, constant_values=np.array(_PADDING).astype(x.dtype))

    cut = problem.map_along("B", lambda x, axis: x.take(call.rows, axis))
    cut = cut.map_along("T", lambda x, axis: x[(slice(None),) * axis + (queries,)]).map_along("S", fit_keys)
    sizes = (shared.mask, shared.batch, shared.num_q_heads, shared.q_length, shared.kv_length, shared.seed)
    spec = shared.stored
    draw_layout = None if spec is None else FORMS[spec.form].draw_layout
    storage = None if spec is None or draw_layout is None else draw_layout(shared, spec)
    return dataclasses.replace(cut, mask=mask_spec.build_mask(*sizes), storage=storage)
