"""Describe which indices along one axis are wrong: the first, the last, all from a block's border on, and so on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

NOUNS = {
    "B": "batch row",
    "T": "row",
    "S": "key",
    "N": "head",
    "K": "key/value head",
    "L": "entry",
    "H": "column",
    "V": "column",
}
"""Word for an index along each axis; a row is a query, an entry a row of a table that a function captures."""
MIN_FILLED = 0.75
"""Least share of the judged indices in a description that must be wrong."""
_MIN_BLOCK = 8
_MAX_LISTED = 3


@dataclasses.dataclass(frozen=True, eq=False)
class AxisIndices:
    """A description of the indices `chosen` (booleans), and the size `block` of blocks that they follow, 0 for none."""

    words: str
    chosen: np.ndarray
    block: int = 0


def describe_indices(letter: str, wrong: np.ndarray, judged: np.ndarray, group: int) -> AxisIndices | None:
    """Find the plainest description of the wrong indices along the axis `letter`, a key of `NOUNS`.

    Returns None if every judged index is wrong, or no description fits.
    """
    if not wrong.any() or not (judged & ~wrong).any():
        return None
    for candidate in _iter_candidates(letter, wrong, group):
        within = candidate.chosen & judged
        if not (wrong & ~candidate.chosen).any() and wrong.sum() >= MIN_FILLED * within.sum():
            return candidate
    return None


def _iter_candidates(letter: str, wrong: np.ndarray, group: int) -> Iterator[AxisIndices]:
    """Yield descriptions of the wrong indices, the most specific first. Only a run may include right indices too."""
    yield from _iter_single(letter, wrong)
    if letter == "N":
        yield from _iter_head_groups(wrong, group)
    if letter in "TS":
        yield from _iter_periodic(letter, wrong)
    yield from _iter_runs(letter, wrong)
    if letter in "BNK" and wrong.sum() <= _MAX_LISTED:
        listed = ", ".join(str(i) for i in np.flatnonzero(wrong))
        yield AxisIndices(f"{NOUNS[letter]}s {listed}", wrong)


def _iter_single(letter: str, wrong: np.ndarray) -> Iterator[AxisIndices]:
    """Yield the description of a single wrong index."""
    if wrong.sum() != 1:
        return
    here, last = int(np.argmax(wrong)), len(wrong) - 1
    if letter in "TSHV" and here in (0, last):
        yield AxisIndices(f"the {'last' if here else 'first'} {NOUNS[letter]}", wrong)
    else:
        yield AxisIndices(f"{NOUNS[letter]} {here}", wrong)


def _iter_head_groups(wrong: np.ndarray, group: int) -> Iterator[AxisIndices]:
    """Yield descriptions of query heads by their place in the group that shares a key/value head."""
    heads = np.arange(len(wrong))
    groups = len(wrong) // group
    if group == 1:
        return
    if groups > 1 and np.array_equal(wrong, heads // group != heads % groups):
        yield AxisIndices("heads that an interleaved head map (n % K) would give another key/value head", wrong)
    if np.array_equal(wrong, heads % group != 0):
        yield AxisIndices("every head of a group but the first", wrong)
    if groups > 1 and np.array_equal(wrong, heads % group == 0):
        yield AxisIndices("the first head of every group", wrong)
    if groups > 1 and np.array_equal(wrong, heads % group == group - 1):
        yield AxisIndices("the last head of every group", wrong)
    if groups > 1 and np.array_equal(wrong, heads >= group):
        yield AxisIndices("heads of every group but the first", wrong)


def _iter_periodic(letter: str, wrong: np.ndarray) -> Iterator[AxisIndices]:
    """Yield descriptions of wrong indices that repeat from block to block, if there are at least two blocks.

    The largest block comes first, since a pattern of large blocks may fit smaller ones too.
    """
    places, noun = np.arange(len(wrong)), NOUNS[letter]
    for block in [2**n for n in range((len(wrong) // 2).bit_length() - 1, 0, -1)]:
        inside = places % block
        found = np.unique(inside[wrong])
        if len(found) == 1 and np.array_equal(wrong, inside == found[0]):
            which = {0: "first", block - 1: "last"}.get(int(found[0]), f"number {found[0]}")
            odd = ("even" if found[0] == 0 else "odd") if block == 2 else ""
            words = f"{odd} {noun}s" if odd else f"{noun}s that are the {which} of a block of {block}"
            yield AxisIndices(words.replace("the number", "number"), wrong, 0 if odd else block)
        if block < _MIN_BLOCK:
            continue
        for which, missing in (("first", 0), ("last", block - 1)):
            if np.array_equal(wrong, inside != missing):
                yield AxisIndices(f"{noun}s that are not the {which} of a block of {block}", wrong, block)
        for which, parity in (("first", 0), ("second", 1)):
            if len(wrong) > (2 + parity) * block and np.array_equal(wrong, places // block % 2 == parity):
                words = f"every second block of {block} {noun}s, from the {which} on"
                yield AxisIndices(words, wrong, block)


def _iter_runs(letter: str, wrong: np.ndarray) -> Iterator[AxisIndices]:
    """Yield the run of indices from the first wrong one to the last wrong one."""
    places, noun, length = np.arange(len(wrong)), NOUNS[letter], len(wrong)
    low, high = int(np.argmax(wrong)), length - 1 - int(np.argmax(wrong[::-1]))
    run = (places >= low) & (places <= high)
    if low == 0 and high == length - 1:
        return
    if low == 0:
        words = f"all {noun}s but the last" if high == length - 2 else f"{noun}s before {high + 1}"
        block = 0 if high == length - 2 else _find_block(high + 1)
    elif high == length - 1:
        first = "batch rows over 0" if letter == "B" else f"all {noun}s but the first"
        words, block = (first, 0) if low == 1 else (f"{noun}s from {low} on", _find_block(low))
    else:
        words, size = f"{noun}s {low} to {high}", high + 1 - low
        block = size if size >= _MIN_BLOCK and size & (size - 1) == 0 and low % size == 0 else 0
        yield AxisIndices(f"{words}, a block of {block}" if block else words, run, block)
        return
    yield AxisIndices(f"{words}, a multiple of {block}" if block and letter in "TS" else words, run, block)


def _find_block(place: int) -> int:
    """Return the largest block whose border an index may be: the largest power of two that divides it; 0 if small."""
    block = place & -place
    return block if block >= _MIN_BLOCK else 0
