"""Models: the axes that the cases of a covering array vary along, and what goes together on them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from cases.case import Case


@dataclasses.dataclass(frozen=True)
class Lengths:
    """A level of an axis of lengths."""

    phase: str
    q: int
    kv: int
    may_swap: bool = False  # whether q and kv change places in some cases
    instead_of: Lengths | None = None  # only for what does not support that level


@dataclasses.dataclass(frozen=True)
class Axis:
    """A name and its levels, the plainest first."""

    name: str
    levels: tuple[Any, ...]
    rich: Any = None  # the level of the case that has every operand, as far as it is supported
    rare: bool = False  # few implementations support more than its first level; the others' grids leave the axis out
    cheap: bool = False  # cases that differ in it alone share compiled programs

    def stand_ins(self) -> list[tuple[int, int]]:
        """The stand-ins, `(level, the other)` by index: asked only of implementations that do not support the other."""
        replaced = ((n, getattr(level, "instead_of", None)) for n, level in enumerate(self.levels))
        return [(n, self.levels.index(other)) for n, other in replaced if other is not None]


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """What a covering array covers. There are few models, and each is equal to itself alone.

    Attributes:
      axes: one of them is cheap.
      compatible: false if levels given so far, by name of the axis, cannot stand in one case.
      assemble: the case with one level of every axis, and a seed.
      strongest: how many levels are covered together at most, at whatever level of the grid.
    """

    axes: tuple[Axis, ...]
    compatible: Callable[[Mapping[str, Any]], bool]
    assemble: Callable[[Mapping[str, Any], int], Case]
    strongest: int = 4

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(axis.name for axis in self.axes)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many levels each axis has."""
        return tuple(len(axis.levels) for axis in self.axes)

    def levels(self, row: tuple[int | None, ...]) -> dict[str, Any]:
        """The levels of a row, by name of the axis, those that are still open left out."""
        return {self.names[a]: self.axes[a].levels[level] for a, level in enumerate(row) if level is not None}
