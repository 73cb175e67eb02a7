"""Define error maps: coarse pictures in text of where a result is wrong.

The judge adds an error map to the record of a failure, and reports draw it. A map is small enough for one line of a
file of records.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

MAX_CELLS = 24
"""The largest number of cells along either axis of a map, chosen so that a thumbnail can show them."""

# The length of an axis. The limit of 2**40 only keeps absurd values out.
_Size: TypeAlias = Annotated[int, Meta(ge=0, lt=2**40)]
_Cells: TypeAlias = Annotated[str, Meta(max_length=MAX_CELLS, pattern=r"^[-0-9]*\Z")]
_CellLines: TypeAlias = Annotated[tuple[_Cells, ...], Meta(max_length=MAX_CELLS)]
_Axis: TypeAlias = Annotated[str, Meta(pattern=r"^[BTSNKHV]{1,2}\Z")]


class ErrorMap(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The largest ratio of a result in each cell of a coarse grid.

    A cell is one character. `-` means that no element of the cell is judged. `0` is a ratio up to a tenth of the limit,
    `1` a ratio up to the limit, `2` a ratio up to ten times the limit, and so on by powers of ten. `8` is any larger
    ratio, and `9` is NaN or infinity.

    Attributes:
      axes: the axes along lines and along columns, in the letters of docs/contract.md. `BN` is the flattened pair of
        axes: all heads of the first batch row, then all heads of the next.
      shape: the size of the result along each of the two axes.
      cells: lines of cells; each line covers a range of the first axis.
      at: the batch row and the query head of the worst element, which `mask` and `marks` show.
      mask: the mask as lines of cells: `0` if no pair of query and key in the cell may attend, `2` if all may, `1` if
        some may; empty without a picture of the mask.
      mask_shape: the number of queries and of keys of the mask.
      marks: cells of the result along one axis of the mask, to be drawn beside the mask.
      along: the axis of `marks`, `T` for queries or `S` for keys.
      blocks: the sizes of the query and key blocks at whose borders the error changes; 0 for an unknown size.
    """

    axes: tuple[_Axis, _Axis]
    shape: tuple[_Size, _Size]
    cells: _CellLines
    at: tuple[_Size, _Size] = (0, 0)
    mask: _CellLines = ()
    mask_shape: tuple[_Size, _Size] = (0, 0)
    marks: _Cells = ""
    along: Annotated[str, Meta(pattern=r"^[TS]?\Z")] = ""
    blocks: tuple[_Size, _Size] = (0, 0)
