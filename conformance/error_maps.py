"""A coarse picture of where a result is wrong, small enough for a line of a file of records."""

from __future__ import annotations

import dataclasses

MAX_CELLS = 24
"""Cells along either side: what a picture of the size of a thumbnail can show."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorMap:
    """Where a result is wrong, coarsely: the largest ratio in each of at most `MOST_CELLS` by `MOST_CELLS` cells.

    A cell is `-` where nothing is judged, `0` up to a tenth of the limit, `1` up to the limit, `2` up to ten times over
    it, and so on by powers of ten to `8`, which is anything beyond; `9` is NaN and infinity.

    Attributes:
      axes: what the lines and the columns of `cells` go along, in letters of the contract; `BN` is all heads of the
        first batch row, then those of the next.
      shape: how many indices there are along each.
      cells: a line for each part of the first axis.
      at: the batch row and the query head of `mask` and `marks`, those of the worst element.
      mask: `0` where none of a cell's pairs of query and key may attend, `2` where all may, `1` else; or empty.
      mask_shape: how many queries and keys it is of.
      marks: cells as above for the queries (`along` is `T`) or the keys (`S`) of the mask.
      along: which of the two.
      blocks: sizes of the blocks of queries and of keys by whose borders the pattern goes, 0 where none is known.
    """

    axes: tuple[str, str]
    shape: tuple[int, int]
    cells: tuple[str, ...]
    at: tuple[int, int] = (0, 0)
    mask: tuple[str, ...] = ()
    mask_shape: tuple[int, int] = (0, 0)
    marks: str = ""
    along: str = ""
    blocks: tuple[int, int] = (0, 0)
