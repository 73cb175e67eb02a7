"""Masks that go by `j - i` alone, the keys of a band along the diagonal: which parts of a block such a band leaves.

A causal mask and a window hide of every block on their border the same. So what is hidden of it is known when the
kernel is built: the kernel has code for the blocks of each border, without the hidden parts, with the mask on those
parts only that the border crosses, and with no position to be computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from cases.masks import And, Causal, Full, Mask, Window
from impls.splash_tpu.block_sizes import Blocks


class Band(NamedTuple):
    """The least and the largest `j - i` that may attend, none on a side without a border."""

    first: int | None
    last: int | None


class KeySpan(NamedTuple):
    """Keys of one step of computing, for the queries of a part.

    Attributes:
      start: the first, inside the block.
      size: how many.
      masked: whether the mask hides any of them from any of the queries.
      diagonal: `j - i` of the first key and the first query of the part, none where it is known at run time only.
    """

    start: int
    size: int
    masked: bool
    diagonal: int | None = None


class BlockPart(NamedTuple):
    """Some queries of a block, and the keys that they may attend to."""

    rows: slice
    keys: tuple[KeySpan, ...]

    @property
    def size(self) -> int:
        """Queries."""
        size: int = self.rows.stop - self.rows.start
        return size


def find_band(mask: Mask | None) -> Band | None:
    """The band of a mask, none if it is not one."""
    match mask:
        case Full():
            return Band(None, None)
        case Causal(offset):
            return Band(None, offset)
        case Window(left, right, offset):
            return Band(None if left is None else offset - left, None if right is None else offset + right)
        case And(left, right):
            one, other = find_band(left), find_band(right)
            if one is None or other is None:
                return None
            firsts, lasts = ([x for x in side if x is not None] for side in zip(one, other, strict=True))
            return Band(max(firsts, default=None), min(lasts, default=None))
        case _:
            return None


def find_diagonals(mask: Mask, lengths: tuple[int, int], blocks: Blocks, at: np.ndarray) -> tuple[int, ...]:
    """Where the blocks lie that the mask hides a part of, if the kernel is to have code for each such place.

    Args:
      mask: any mask.
      lengths: T of a shard, and S.
      blocks: block sizes.
      at: `j - i` of the first key and the first query of each such block.

    Returns:
      the different ones; none if the mask is not a band, blocks are not whole, or the places are too many.
    """
    ragged = lengths[0] % blocks.q or lengths[1] % blocks.kv
    if find_band(mask) is None or ragged:
        return ()
    found = np.unique(at)
    most = (
        _MAX_DIAGONALS if blocks.static_parts != (blocks.q, blocks.kv) else 1
    )  # of a block that has no parts, one code does for all
    return tuple(found.tolist()) if len(found) <= most else ()


_MAX_DIAGONALS = 4
"""Places of masked blocks that a kernel has code for."""


def split_whole_block(blocks: Blocks, rows: int, *, masked: bool) -> tuple[BlockPart, ...]:
    """A block of which nothing is left out, in parts of some queries."""
    return tuple(
        BlockPart(slice(row, row + rows), _list_spans(range(0, blocks.kv, blocks.compute), masked))
        for row in range(0, blocks.q, rows)
    )


def iter_parts(blocks: Blocks) -> Iterator[BlockPart]:
    """The parts of a masked block, each to be left out by itself, in the order of their flags."""
    q, kv = blocks.parts
    for row, start in itertools.product(range(0, blocks.q, q), range(0, blocks.kv, kv)):
        yield BlockPart(slice(row, row + q), _list_spans(range(start, start + kv, blocks.compute), masked=True))


def cut_block(blocks: Blocks, band: Band, diagonal: int) -> tuple[BlockPart, ...]:
    """What a band leaves of a block at a place: hidden parts are left out, and those in full view are not masked."""
    q, kv = blocks.static_parts
    step, found = min(kv, blocks.compute), []
    for row in range(0, blocks.q, q):
        keys: list[KeySpan] = []
        for start in range(0, blocks.kv, step):
            at = diagonal + start - row
            low, high = at - (q - 1), at + (step - 1)  # of `j - i`
            if (band.first is not None and high < band.first) or (band.last is not None and low > band.last):
                continue
            masked = (band.first is not None and low < band.first) or (band.last is not None and high > band.last)
            last = keys[-1] if keys else None
            if last and not (masked or last.masked) and last.size < blocks.compute:
                keys[-1] = last._replace(size=last.size + step)  # what is in full view is next to it
            else:
                keys.append(KeySpan(start, step, masked, at))
        if keys:
            found.append(BlockPart(slice(row, row + q), tuple(keys)))
    return tuple(found)


def compute_allowed_in_band(band: Band, keys: KeySpan, queries: int, difference: Any, diagonal: Any) -> Any:
    """Which pairs of a tile a band allows, none if all are known to be.

    Args:
      band: the band.
      keys: of the tile.
      queries: how many it has.
      difference: of the places in the tile of key and query.
      diagonal: `j - i` of the first of both.
    """
    found = None
    if band.first is not None and (keys.diagonal is None or keys.diagonal - (queries - 1) < band.first):
        found = difference >= band.first - diagonal
    if band.last is not None and (keys.diagonal is None or keys.diagonal + (keys.size - 1) > band.last):
        before = difference <= band.last - diagonal
        found = before if found is None else found & before
    return found


def _list_spans(starts: range, masked: bool) -> tuple[KeySpan, ...]:
    return tuple(KeySpan(start, starts.step, masked) for start in starts)
