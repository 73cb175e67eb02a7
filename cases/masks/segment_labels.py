"""Draw the segment ids of a case: labels of the sequences that share one batch row.

The operand module `cases.optional_operands.segment_ids_operand` calls `draw_segment_ids`.
"""

from __future__ import annotations

import numpy as np

from cases.case_fields import CaseFields
from cases.counter_rng import draw_integers
from cases.masks import Mask


def draw_segment_ids(case: CaseFields, mask: Mask) -> tuple[np.ndarray, np.ndarray] | None:
    """Draw segment ids of queries and keys, int32 `[B, T]` and `[B, S]`; None if the case has none.

    The cuts between sequences differ in every batch row. Labels are not sorted.

    Args:
      case: the case; `case.segments` names the kind of labels. `segpad` adds padding to queries and keys. `segwild` has
        labels that are equal once cast to a narrower type, and a label that occurs again after larger ones. `segmany`
        has many short sequences, each with its own label. `segamid` has text with one label, and pictures inside the
        text that are shorter than any block.
      mask: the case's mask; the keys that a MoBA mask selects must be known. A query that would see no key of its
        segment gets the label of another segment.
    """
    if case.segments is None:
        return None
    shorter = min(case.q_length, case.kv_length)
    kv_ids = np.stack([_draw_labels(case, f"kv{b}", case.kv_length, b) for b in range(case.batch)])
    if case.q_length == case.kv_length:
        q_ids = kv_ids.copy()
    else:
        q_ids = np.stack([_draw_labels(case, f"q{b}", case.q_length, b) for b in range(case.batch)])
    if case.segments == "segpad":
        # Padding of queries and padding of keys have different ids, so padding neither attends nor is attended to.
        kv_ids[:, case.kv_length - max(1, shorter // 6) :] = -2
        q_ids[:, case.q_length - shorter // 6 :] = -1
    return _make_reachable(q_ids, kv_ids, mask.dense(case.q_length, case.kv_length)), kv_ids


# Labels that a kernel may confuse. In 8 bits 256 equals 0, and in 16 bits `-2**31` does. In f32 `2**31 - 2` equals
# `2**31 - 1`. Kernels give -1, `-2**31` or `2**31 - 1` to padding. 0 occurs again at the end, after larger labels, and
# is no special label.
_CONFUSABLE_LABELS = (0, 2**31 - 2, -1, 256, -(2**31), 2**31 - 1, 0)


# The largest number of positions of one sequence under `segmany`.
_MAX_SHORT_LENGTH = 12
# The period, in positions, of `segamid`: positions 5 to 9 of each period are a picture, the others are text. So a block
# of 16 or more begins and ends with text and contains a picture.
_TEXT_AND_PICTURE_PERIOD = 16


def _draw_labels(case: CaseFields, stream: str, length: int, row: int) -> np.ndarray:
    """Draw the labels of one batch row, `[length]`.

    Two cuts are random. Two more are half of `min(T, S)` from the start and from the end of the row. There the first
    and the last queries can see them, even under a mask that hides most keys.
    """
    if case.segments == "segmany":
        lengths = 1 + draw_integers(case.seed, f"lengths-{stream}", (length,), _MAX_SHORT_LENGTH)
        # Labels fall from sequence to sequence, so neighbours differ, and labels are not the sequences' indices.
        return np.repeat(np.arange(length)[::-1] * 3, lengths)[:length].astype(np.int32)
    if case.segments == "segamid":
        place = np.arange(length) % _TEXT_AND_PICTURE_PERIOD
        return np.where((place >= 5) & (place < 10), 1 + row, 0).astype(np.int32)
    labels = np.array(_CONFUSABLE_LABELS) if case.segments == "segwild" else np.array([5, 2, 9, 4, 7]) + row
    third = max(1, length // 3)
    drawn = draw_integers(case.seed, f"cuts-{stream}", (2,), third) + np.array([third // 2 + 1, third + third // 2])
    half = min(case.q_length, case.kv_length) // 2
    cuts = np.sort(np.concatenate([drawn, [max(1, half), length - max(8, half)]]))
    if case.segments == "segwild":
        cuts = np.sort(np.concatenate([cuts, [length // 8 + 1, length - max(4, half // 2)]]))
    return labels[np.searchsorted(cuts, np.arange(length), side="right")].astype(np.int32)


def _make_reachable(q_ids: np.ndarray, kv_ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Give each query that sees no key of its own segment the label of the last key that `mask` lets it see."""
    visible = mask.any(axis=1) & (kv_ids != -2)[:, None, :]  # [B, T, S]
    meets = (visible & (q_ids[:, :, None] == kv_ids[:, None, :])).any(axis=-1)
    last = visible.shape[-1] - 1 - np.argmax(visible[..., ::-1], axis=-1)
    nearest = np.take_along_axis(kv_ids, last, axis=1)
    stays = meets | ~visible.any(axis=-1) | (q_ids == -1)
    return np.where(stays, q_ids, nearest).astype(np.int32)
