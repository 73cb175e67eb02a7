"""Band masks, which depend on `j - i` only, and the parts of a block that a band leaves visible.

A causal mask or a window hides the same positions in every block on its border. So the hidden positions are known when
the kernel is built. The kernel has specialised code for the blocks of each border: it skips hidden parts, applies the
mask only to parts that the border crosses, and computes no positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from cases.masks import And, Causal, Full, Mask, Window
from impls.splash_tpu.block_sizes import Blocks


class Band(NamedTuple):
    """Smallest and largest `j - i` that may attend; None on an open side."""

    first: int | None
    last: int | None


class KeySpan(NamedTuple):
    """A run of keys that is computed at once for the queries of a part.

    Attributes:
      start: index of the first key in the block.
      size: number of keys.
      masked: whether the mask hides any of these keys from any query of the part.
      diagonal: `j - i` of the run's first key and the part's first query; None if known at run time only.
    """

    start: int
    size: int
    masked: bool
    diagonal: int | None = None


class BlockPart(NamedTuple):
    """A run of queries of a block, with the runs of keys that they may attend to."""

    rows: slice
    keys: tuple[KeySpan, ...]

    @property
    def size(self) -> int:
        """Number of queries."""
        size: int = self.rows.stop - self.rows.start
        return size


def find_band(mask: Mask | None) -> Band | None:
    """Return the band that is equal to `mask`, or None if the mask is not a band."""
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
    """List the diagonals of partially masked blocks that the kernel gets specialised code for.

    Args:
      mask: any mask.
      lengths: `(T, S)`, with T of one shard.
      blocks: block sizes.
      at: diagonal of each partially masked block: `j - i` of its first key and its first query.

    Returns:
      the distinct diagonals. Empty if the mask is not a band, a length is not a multiple of its block, or there are too
      many diagonals.
    """
    ragged = lengths[0] % blocks.q or lengths[1] % blocks.kv
    if find_band(mask) is None or ragged:
        return ()
    found = np.unique(at)
    # A block without parts needs the same code at every diagonal, so several would gain nothing.
    limit = _MAX_DIAGONALS if blocks.static_parts != (blocks.q, blocks.kv) else 1
    return tuple(found.tolist()) if len(found) <= limit else ()


_MAX_DIAGONALS = 4
"""Diagonals of masked blocks that a kernel has specialised code for, at most."""


def split_whole_block(blocks: Blocks, rows: int, *, masked: bool) -> tuple[BlockPart, ...]:
    """Split a block, with nothing skipped, into parts of `rows` queries."""
    return tuple(
        BlockPart(slice(row, row + rows), _list_spans(range(0, blocks.kv, blocks.compute), masked))
        for row in range(0, blocks.q, rows)
    )


def iter_parts(blocks: Blocks) -> Iterator[BlockPart]:
    """Yield the parts of a masked block that can be skipped individually, in the order of their flags."""
    q, kv = blocks.parts
    for row, start in itertools.product(range(0, blocks.q, q), range(0, blocks.kv, kv)):
        yield BlockPart(slice(row, row + q), _list_spans(range(start, start + kv, blocks.compute), masked=True))


def cut_block(blocks: Blocks, band: Band, diagonal: int) -> tuple[BlockPart, ...]:
    """List the visible parts of a block at a diagonal. Hidden parts are left out, fully visible ones are unmasked."""
    q, kv = blocks.static_parts
    step, found = min(kv, blocks.compute), []
    for row in range(0, blocks.q, q):
        keys: list[KeySpan] = []
        for start in range(0, blocks.kv, step):
            at = diagonal + start - row
            low, high = at - (q - 1), at + (step - 1)  # smallest and largest `j - i` of the part
            if (band.first is not None and high < band.first) or (band.last is not None and low > band.last):
                continue
            masked = (band.first is not None and low < band.first) or (band.last is not None and high > band.last)
            last = keys[-1] if keys else None
            if last and not (masked or last.masked) and last.size < blocks.compute:
                keys[-1] = last._replace(size=last.size + step)  # join adjacent fully visible runs
            else:
                keys.append(KeySpan(start, step, masked, at))
        if keys:
            found.append(BlockPart(slice(row, row + q), tuple(keys)))
    return tuple(found)


def compute_allowed_in_band(band: Band, keys: KeySpan, queries: int, difference: Any, diagonal: Any) -> Any:
    """Compute which positions of a tile a band allows; None if all are known to be allowed.

    Args:
      band: the band.
      keys: keys of the tile.
      queries: number of queries of the tile.
      difference: index of the key minus index of the query, within the tile.
      diagonal: `j - i` of the first key and the first query.
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
