"""Cases of a sequence that is computed piece by piece: chunks of a prompt, then single tokens.

The cache has the length of the whole sequence from the start, and more of it is filled with every piece. The last key
is never filled, so that the end of the cache is not that of the sequence. Where an operand goes by how far a key is
from the end of the cache, a piece gets what is filled of it alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from cases import mask_spec
from cases.case import Case
from cases.grid import Supports
from cases.operand_registry import OPTIONAL
from cases.operand_values import Problem

LENGTH = 40
PIECES = ((0, 18), (18, 36), (36, 37), (38, 39))
"""First query, and one past the last, of each piece; what is left out was computed by somebody else."""

# The masks that say which keys a token sees before there are later tokens: a formula of its position; chunks, one of
# which ends where the first token is decoded; packed sequences; rows of an array; a selection made at run time; spans
# of a prompt, each within one piece; the chunks that a token's gates choose. Then some with a quantised cache, one
# whose logits fall with the distance, and one with a score of batch row, head and distance.
_DECODING_FIELDS: tuple[dict[str, Any], ...] = (
    {"mask": "causal"},
    {"mask": "window-l9-r0"},
    {"mask": "chunked-12"},
    {"mask": "causal", "segments": "seg"},
    {"mask": "causal_and_dense-d60"},
    {"mask": "causal_and_indexer-d60"},
    {"mask": "causal_or_spans-3-14-20-33"},
    {"mask": "moba-8-3"},
    {"mask": "causal", "kv_cache": "kvint8-token"},
    {"mask": "window-l9-r0", "kv_cache": "kvfp8-head"},
    {"mask": "causal", "alibi": True},
    {"mask": "causal", "score": "score-rows"},
)
_HEADS = ((4, 2), (2, 2))


def cut_case(case: Case, start: int, stop: int) -> Case:
    """The case of the queries `start` to `stop - 1` alone, at their positions.

    A mask that is an array is not in the id: `part` has its rows.
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
    """The queries `start` to `stop - 1` of `whole`, over a cache that is filled up to the last of them.

    Args:
      whole: all queries, of which each sees no key behind its piece.
      start: the first query.
      stop: one past the last.
      stale: what is behind the last key; the largest number there is where memory holds integers.
    """
    cut = whole.along("T", lambda x, axis: x.take(range(start, stop), axis))
    mask = whole.mask.of_queries(start, stop, (whole.q.shape[1], whole.k.shape[1]))
    if whole.is_positional:
        # Operands that count from the end of the cache get as much of it as is filled.
        cut = cut.along("S", lambda x, axis: x.take(range(stop), axis))
        return dataclasses.replace(cut, mask=mask)
    cut = cut.along("S", lambda x, axis: _fill_behind(x, axis, stop, stale))
    if whole.segment_ids is not None and cut.segment_ids is not None:
        q_ids, kv_ids = whole.segment_ids
        # What is not filled gets the last token's segment: a kernel that takes it for filled attends to it.
        kv_ids = np.where(np.arange(kv_ids.shape[1]) < stop, kv_ids, q_ids[:, stop - 1, None])
        cut = dataclasses.replace(cut, segment_ids=(cut.segment_ids[0], kv_ids))
    return dataclasses.replace(cut, mask=mask)


def select_decoding_cases(seed: int = 0, supports: Supports = lambda case: None) -> tuple[Case, ...]:
    """One case for each mask that has a meaning token by token, if all its pieces are supported."""
    return tuple(case for fields in _DECODING_FIELDS if (case := _find_supported(fields, seed, supports)) is not None)


def _find_supported(fields: dict[str, Any], seed: int, supports: Supports) -> Case | None:
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
    """`x` with `stale` behind key `stop - 1`; the largest number there is where `x` holds integers."""
    kept = x.copy()
    behind = np.moveaxis(kept, axis, 0)[stop:]
    behind[...] = np.iinfo(x.dtype).max if np.issubdtype(x.dtype, np.integer) else stale
    return kept
