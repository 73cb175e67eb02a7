"""The operand `segment_ids`: labels of the sequences that share a batch row.

A query attends only to keys with the same label. `cases.masks.segment_labels` draws the labels.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from cases.case_fields import CallOperands, CaseFields
from cases.masks import segment_labels
from cases.moba_mask import resolve_choices
from cases.operand import OptionalOperand
from cases.operand_validation import CallSizes, validate_array, validate_pair

SEGMENTS = ("seg", "segpad", "segwild", "segmany", "segamid")
"""The kinds of segment ids that a case id can name; `cases.masks.segment_labels` describes them."""


def _draw(case: CaseFields, problem: CallOperands, spread: float) -> Any:
    return segment_labels.draw_segment_ids(case, resolve_choices(problem.mask, problem.q, problem.k))


def _validate(name: str, segment_ids: Any, sizes: CallSizes, dtypes: Collection[str]) -> None:
    validate_pair(name, segment_ids)
    for side, ids, length in zip(("q", "kv"), segment_ids, (sizes.q_length, sizes.kv_length), strict=True):
        validate_array(f"{name} of {side}", ids)
        if np.shape(ids) != (sizes.batch, length):
            raise ValueError(f"{name} of {side} must have shape {(sizes.batch, length)}, got {np.shape(ids)}")
    for side, ids in zip(("q", "kv"), segment_ids, strict=True):
        if not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"{name} of {side} must be integers, of dtype int32, got {ids.dtype}")


def _build_null(problem: CallOperands) -> tuple[np.ndarray, np.ndarray]:
    """Build segment ids that are all 0, so that they hide no key."""
    return np.zeros(problem.q.shape[:2], np.int32), np.zeros(problem.k.shape[:2], np.int32)


OPERAND = OptionalOperand(
    name="segment_ids",
    arrays=(("B", "T"), ("B", "S")),
    field="segments",
    form="segments",
    levels=SEGMENTS,
    description="segment ids of q and kv",
    words="segment ids",
    traits={
        "segpad": ("segment ids of padding, which attends to nothing",),
        "segwild": ("segment ids that need all 32 bits",),
        "segmany": ("many short segments",),
    },
    grid_levels=("seg", "segpad"),
    combined_level="seg",
    vmap="segments",
    draw=_draw,
    validate=_validate,
    null=_build_null,
)
