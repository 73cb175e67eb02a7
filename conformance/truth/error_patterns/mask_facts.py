"""Group rows and keys by their relation to the mask, such as rows that see no key or rows that see one key.

`locations.py` looks for a group that holds all wrong elements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from conformance.truth.error_patterns.failure import Failure

BLOCK_SIZES = (128, 64, 32, 16)
"""Sizes of blocks that kernels use."""
_MAX_PAIRS = 4_000_000  # most pairs of a mask for which blocks are examined: this takes longer than all else


@dataclasses.dataclass(frozen=True, eq=False)
class MaskFact:
    """Units (rows, keys or pairs) that have the same relation to the mask."""

    words: str  # the relation in words, such as "rows that see the last key"
    units: np.ndarray  # booleans broadcastable to the units of the observable, true for units that have the relation
    # Whether the relation may be the cause of an error. Then it is preferred to a description by indices that fits as
    # well.
    is_cause: bool = True
    block: int = 0  # size of the blocks of keys that the relation mentions; 0 if it mentions none


def iter_mask_facts(failure: Failure) -> Iterator[MaskFact]:
    """Yield groups of a result's units by their relation to the mask; nothing if the mask does not apply to it."""
    if not failure.is_core or failure.problem.allowed.shape[-2] == 0:
        return
    letters = failure.unit_letters
    if letters == "BNTS":
        allowed = failure.problem.allowed
        for axis, length in enumerate(failure.got.shape):
            if length == 1:  # an entry of a broadcast bias counts as masked only if all its pairs are
                allowed = np.logical_or.reduce(allowed, axis=axis, keepdims=True)
        yield MaskFact("pairs behind the mask", ~allowed)
    elif letters == "BSK":
        yield from _iter_key_facts(failure)
    elif "T" in letters:
        for fact in _iter_row_facts(failure):
            units = fact.units if letters == "BNT" else fact.units.swapaxes(1, 2)
            yield dataclasses.replace(fact, units=units)


def _iter_row_facts(failure: Failure) -> Iterator[MaskFact]:
    """Yield groups of rows (queries) by what they see, as booleans `[b, n, T]` with `b` and `n` 1 or full."""
    problem = failure.problem
    allowed = problem.allowed
    seen = allowed.sum(axis=-1)
    length = allowed.shape[-1]
    yield MaskFact("rows that may attend to nothing", seen == 0)
    yield MaskFact("rows that see one key alone", seen == 1)
    if problem.segment_ids is not None:
        ids = problem.segment_ids[0]
        yield MaskFact("rows of other segments than the first", (ids != ids[:, :1])[:, None, :], is_cause=False)
    yield MaskFact("rows from which a key is hidden", seen < length)
    yield MaskFact("rows that see every key", seen == length, is_cause=False)
    yield MaskFact("rows that see the last key", allowed[..., -1], is_cause=False)
    yield MaskFact("rows that do not see the first key", ~allowed[..., 0], is_cause=False)
    if allowed.size > _MAX_PAIRS:
        return
    for block in (size for size in BLOCK_SIZES if size < length):
        starts = np.arange(0, length, block)
        blocks = np.logical_or.reduceat(allowed, starts, axis=-1)
        yield MaskFact(f"rows whose first block of {block} keys is empty", ~blocks[..., 0], False, block)
        if length % block:
            words = f"rows that see keys past the last whole block of {block}"
            yield MaskFact(words, blocks[..., -1], False, block)
        before_a_seen_one = np.logical_or.accumulate(blocks[..., ::-1], axis=-1)[..., ::-1]
        skipped = np.logical_or.reduce(~blocks & before_a_seen_one, axis=-1)
        yield MaskFact(f"rows that see keys behind an empty block of {block}", skipped, False, block)


def _iter_key_facts(failure: Failure) -> Iterator[MaskFact]:
    """Yield groups of keys by which queries see them, as booleans `[B, S, K]`."""
    problem = failure.problem
    yield MaskFact("keys that no query may attend to", problem.dead_keys)
    groups, heads = problem.k.shape[2], problem.q.shape[2]
    counts = problem.allowed.sum(axis=2)
    every = np.broadcast_to(counts, (problem.q.shape[0], heads, counts.shape[-1]))
    queries = every.reshape(every.shape[0], groups, heads // groups, -1).sum(axis=2)
    yield MaskFact("keys that one query alone attends to", (queries == 1).swapaxes(1, 2))
    if problem.segment_ids is not None:
        ids = problem.segment_ids[1]
        yield MaskFact("keys of other segments than the first", (ids != ids[:, :1])[:, :, None], is_cause=False)
