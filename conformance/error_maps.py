"""A coarse picture of where a result is wrong, small enough for a line of a file of records."""

from __future__ import annotations

import dataclasses
from typing import Any

MOST_CELLS = 24
"""Cells along either side: what a picture of the size of a thumbnail can show."""
_SHADES, _LETTERS = frozenset("-0123456789"), frozenset("BTSNKHV")
_LARGEST = 2**40  # no axis is as long


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

    def __post_init__(self) -> None:
        """Whatever a file says, this is letters, numbers and shades of the right sizes, or it is refused."""
        lines = (*self.cells, *self.mask, self.marks)
        pairs = (self.axes, self.shape, self.at, self.mask_shape, self.blocks)
        if not all(isinstance(x, tuple) for x in (*pairs, self.cells, self.mask)) or {len(x) for x in pairs} != {2}:
            raise ValueError("an error map has pairs of axes, sizes and places")
        if not all(isinstance(line, str) and len(line) <= MOST_CELLS and set(line) <= _SHADES for line in lines):
            raise ValueError("cells of an error map must be digits and dashes")
        if max(len(self.cells), len(self.mask)) > MOST_CELLS or any(
            len(set(map(len, part))) > 1 for part in (self.cells, self.mask)
        ):
            raise ValueError(f"an error map has at most {MOST_CELLS} lines, of one length")
        numbers = (*self.shape, *self.at, *self.mask_shape, *self.blocks)
        if not all(type(n) is int and 0 <= n < _LARGEST for n in numbers):
            raise ValueError("sizes and places of an error map must be whole numbers")
        if not all(isinstance(x, str) and set(x) <= _LETTERS and 0 < len(x) < 3 for x in self.axes):
            raise ValueError("axes of an error map must be letters of the contract")
        if self.along not in ("", "T", "S"):
            raise ValueError("marks of an error map go along T or S")


def from_data(data: Any) -> ErrorMap:
    """The picture in the JSON object of its record. Raises `ValueError` or `TypeError` for what is none."""
    if not isinstance(data, dict):
        raise ValueError(f"an error map must be a JSON object, got {type(data).__name__}")
    fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in data.items()}
    return ErrorMap(**fields)
