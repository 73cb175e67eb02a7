"""Build the cases of the check `decoding`: a sequence computed piece by piece, as chunks of a prompt, then as tokens.

The cache has the length of the whole sequence from the start, and each piece fills more of it. The last key is never
filled, so that the end of the cache is not the end of the sequence. Some operands depend on how far a key is from the
end of the cache. With these operands, a piece gets only the filled part of the cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from cases import mask_spec
from cases.case import Case
from cases.grid import Supports
from cases.operand_registry import OPTIONAL
from cases.operand_values import Problem

LENGTH = 40
PIECES = ((0, 18), (18, 36), (36, 37), (38, 39))
"""`(start, stop)` of each piece: its first query and one past its last. Other positions count as filled before."""

# The fields of each case. First come masks that determine which keys a token sees without knowing later tokens. In this
# order: formulas of the position; chunks, one of which ends where the first token is decoded; packed sequences; rows of
# an array; selections made at run time, by booleans and by lists; spans of a prompt, each within one piece; chunks that
# a token's gates choose. Then come the cases that optional operands add.
_DECODING_FIELDS: tuple[Mapping[str, Any], ...] = (
    {"mask": "causal"},
    {"mask": "window-l9-r0"},
    {"mask": "chunked-12"},
    {"mask": "causal", "segments": "seg"},
    {"mask": "causal_and_dense-d60"},
    {"mask": "causal_and_indexer-d60"},
    {"mask": "causal_and_listed-k12"},
    {"mask": "causal_or_spans-3-14-20-33"},
    {"mask": "moba-8-3"},
    *(fields for operand in OPTIONAL for fields in operand.decoding),
)
_HEADS = ((4, 2), (2, 2))


def cut_case(case: Case, start: int, stop: int) -> Case:
    """Return the case that has only the queries `start` to `stop - 1`, at their positions.

    The mask is shifted to these positions. A case id cannot name the rows of an array mask, so `cut_problem` selects
    them.
    """
    placed = any(getattr(case, operand.field) != operand.absent for operand in OPTIONAL if operand.is_positional)
    return dataclasses.replace(
        case,
        phase="decode" if stop - start == 1 else "prefill",
        q_length=stop - start,
        kv_length=stop if placed else case.kv_length,
        mask=mask_spec.shift_mask_spec(case.mask, start),
    )


def cut_problem(whole: Problem, start: int, stop: int, *, stale: float) -> Problem:
    """Return the problem of the queries `start` to `stop - 1` of `whole`, over a cache filled up to key `stop - 1`.

    Args:
      whole: the problem of all queries. No query may attend to a key after its own piece.
      stale: the value of unfilled cache entries after the last key. Integer caches get their largest integer instead.
    """
    cut = whole.map_along("T", lambda x, axis: x.take(range(start, stop), axis))
    mask = whole.mask.select_queries(start, stop, (whole.q.shape[1], whole.k.shape[1]))
    if whole.is_positional:
        # Operands that count from the end of the cache get only its filled part.
        cut = cut.map_along("S", lambda x, axis: x.take(range(stop), axis))
        return dataclasses.replace(cut, mask=mask)
    cut = cut.map_along("S", lambda x, axis: _fill_behind(x, axis, stop, stale))
    if whole.segment_ids is not None and cut.segment_ids is not None:
        q_ids, kv_ids = whole.segment_ids
        # Unfilled keys get the last token's segment, so that a kernel that treats them as filled attends to them.
        kv_ids = np.where(np.arange(kv_ids.shape[1]) < stop, kv_ids, q_ids[:, stop - 1, None])
        cut = dataclasses.replace(cut, segment_ids=(cut.segment_ids[0], kv_ids))
    return dataclasses.replace(cut, mask=mask)


def select_decoding_cases(seed: int = 0, supports: Supports = lambda case: None) -> tuple[Case, ...]:
    """Select one case for each mask that can be decoded token by token, if all its pieces are supported."""
    return tuple(case for fields in _DECODING_FIELDS if (case := _find_supported(fields, seed, supports)) is not None)


def _find_supported(fields: Mapping[str, Any], seed: int, supports: Supports) -> Case | None:
    """Return the case with these fields whose pieces are all supported, or None."""
    for num_q_heads, num_kv_heads in _HEADS:
        case = Case(
            phase="prefill",
            batch=2,
            q_length=LENGTH,
            kv_length=LENGTH,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            seed=seed,
            **fields,
        )
        if all(supports(part) is None for part in (case, *(cut_case(case, *at) for at in PIECES))):
            return case
    return None


def _fill_behind(x: np.ndarray, axis: int, stop: int, stale: float) -> np.ndarray:
    """Return `x` with `stale` in all entries after key `stop - 1`; integer arrays get their largest integer instead."""
    kept = x.copy()
    behind = np.moveaxis(kept, axis, 0)[stop:]
    behind[...] = np.iinfo(x.dtype).max if np.issubdtype(x.dtype, np.integer) else stale
    return kept
