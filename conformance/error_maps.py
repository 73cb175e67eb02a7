"""Error maps: coarse pictures of where a result is wrong, small enough for one line of a file of records."""

from __future__ import annotations

import dataclasses

MAX_CELLS = 24
"""The most cells along either side: as many as a thumbnail can show."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorMap:
    """The largest ratio of a result in each cell of a coarse grid.

    A cell is one character. `-` means that nothing is judged there. `0` is a ratio up to a tenth of the limit, `1` one
    up to the limit, `2` one up to ten times the limit, and so on by powers of ten to `8`, which is any larger one. `9`
    is NaN or infinity.

    Attributes:
      axes: the axes of lines and columns, in letters of the contract; `BN` is all heads of the first batch row, then
        those of the next.
      shape: the number of indices along each axis.
      cells: the cells, one line for each part of the first axis.
      at: the batch row and the query head that `mask` and `marks` show, those of the worst element.
      mask: `0` where no pair of query and key of a cell may attend, `2` where all may, `1` else; or empty.
      mask_shape: the numbers of queries and keys of the mask.
      marks: cells of the result along one axis of the mask.
      along: that axis, `T` for queries or `S` for keys.
      blocks: the sizes of query and key blocks at whose borders the error changes; 0 where none is known.
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
