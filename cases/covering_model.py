"""Models: the axes along which the cases of a covering array vary, and which levels exclude each other."""

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
    may_swap: bool = False  # whether q and kv are exchanged in some cases
    instead_of: Lengths | None = None  # the level that it replaces for implementations that do not support that one


@dataclasses.dataclass(frozen=True)
class Axis:
    """A name and its levels, the plainest first."""

    name: str
    levels: tuple[Any, ...]
    rich: Any = None  # the level in the case that has every supported operand
    rare: bool = False  # whether grids leave it out where only its first level is supported
    cheap: bool = False  # whether cases that differ in it alone share compiled programs

    def list_stand_ins(self) -> list[tuple[int, int]]:
        """List the stand-ins as index pairs `(level, the level that it replaces)`.

        A stand-in is tested only on implementations that do not support the level that it replaces.
        """
        replaced = ((n, getattr(level, "instead_of", None)) for n, level in enumerate(self.levels))
        return [(n, self.levels.index(other)) for n, other in replaced if other is not None]


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """Axes with levels, to be covered by an array. There are few models, and each is equal only to itself.

    Attributes:
      axes: the axes, exactly one of them cheap.
      compatible: returns False if the levels given so far, by axis name, cannot stand in one case.
      assemble: builds the case from one level of every axis and a seed.
      strongest: the largest number of levels that are covered together, at any level of the grid.
    """

    axes: tuple[Axis, ...]
    compatible: Callable[[Mapping[str, Any]], bool]
    assemble: Callable[[Mapping[str, Any], int], Case]
    strongest: int = 4

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return tuple(axis.name for axis in self.axes)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of levels of each axis."""
        return tuple(len(axis.levels) for axis in self.axes)

    def levels(self, row: tuple[int | None, ...]) -> dict[str, Any]:
        """Return the assigned levels of a row, by axis name."""
        return {self.names[a]: self.axes[a].levels[level] for a, level in enumerate(row) if level is not None}
