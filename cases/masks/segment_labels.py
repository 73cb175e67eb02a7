"""Segment ids of a case: sequences that lie in one row, cut at random places."""

from __future__ import annotations

import numpy as np

from cases.case import Case
from cases.counter_rng import draw_integers
from cases.masks import Mask


def draw_segment_ids(case: Case, mask: Mask) -> tuple[np.ndarray, np.ndarray] | None:
    """Packed sequences, cut anew in every batch row; labels are not monotone.

    `segpad` adds padding on both sides. `segwild` has the labels that a narrower type confuses, and they come back.
    `segmany` has short sequences, each of a label of its own. `segamid` has text of one label, and
    pictures amid it that are shorter than any block.
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
        # Padding of q and padding of kv carry different ids: nobody attends from or to it.
        kv_ids[:, case.kv_length - max(1, shorter // 6) :] = -2
        q_ids[:, case.q_length - shorter // 6 :] = -1
    return _make_reachable(q_ids, kv_ids, mask.dense(case.q_length, case.kv_length)), kv_ids


# Zero is a label like any other. Two are equal to it in 8 and in 16 bits, the largest is equal to another in f32, and
# one is negative. The first comes back at the end, behind larger ones.
_CONFUSABLE_LABELS = (0, 2**31 - 2, -1, 256, 65536, 2**31 - 1, 0)


# Positions that a sequence of `segmany` has at most.
_MAX_SHORT_LENGTH = 12
# Of so many places the middle ones are a picture's: a block of 16 or more begins and ends with text, and has both.
_TEXT_AND_PICTURE_PERIOD = 16


def _draw_labels(case: Case, stream: str, length: int, row: int) -> np.ndarray:
    """Segment labels, cut at two random places and at two that the last and the first queries are sure to see."""
    if case.segments == "segmany":
        lengths = 1 + draw_integers(case.seed, f"lengths-{stream}", (length,), _MAX_SHORT_LENGTH)
        # Neighbours differ, and none is as large as its place says.
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
    """Moves queries that may see no key of their segment to the segment of the last key that they may see."""
    visible = mask.any(axis=1) & (kv_ids != -2)[:, None, :]  # [B, T, S]
    meets = (visible & (q_ids[:, :, None] == kv_ids[:, None, :])).any(axis=-1)
    last = visible.shape[-1] - 1 - np.argmax(visible[..., ::-1], axis=-1)
    nearest = np.take_along_axis(kv_ids, last, axis=1)
    stays = meets | ~visible.any(axis=-1) | (q_ids == -1)
    return np.where(stays, q_ids, nearest).astype(np.int32)
