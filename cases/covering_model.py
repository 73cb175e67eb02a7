"""Define the type of a model: the axes along which the cases of a covering array vary, and which levels go together.

The models are in `cases.feature_model`, `cases.size_model`, `cases.operand_model` and `cases.storage_forms`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from cases.case import Case


@dataclasses.dataclass(frozen=True)
class Lengths:
    """A level of the axis of lengths."""

    phase: str  # `train`, `prefill` or `decode`
    q: int
    kv: int
    may_swap: bool = False  # whether q and kv are exchanged in some cases
    # If given, this level is a stand-in: it is tested only on implementations that do not support `instead_of`.
    instead_of: Lengths | None = None


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis along which cases vary.

    Attributes:
      name: name of the axis, such as `mask`.
      levels: the values that cases have on the axis, the plainest first.
      combined: the level in the combined case, which has every supported operand; None if the combined case has the
        base's level.
      rare: whether the covering array leaves the axis out if only its first level is supported.
      cheap: whether cases that differ only on this axis share compiled programs.
    """

    name: str
    levels: tuple[Any, ...]
    combined: Any = None
    rare: bool = False
    cheap: bool = False

    def list_stand_ins(self) -> list[tuple[int, int]]:
        """List stand-ins as index pairs `(level, replaced level)`, for implementations without the replaced level."""
        replaced = ((n, getattr(level, "instead_of", None)) for n, level in enumerate(self.levels))
        return [(n, self.levels.index(other)) for n, other in replaced if other is not None]


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """Axes with levels, which a covering array combines. There are few models, and each is equal only to itself."""

    axes: tuple[Axis, ...]  # the axes, exactly one of them cheap
    # Returns False if the levels given so far, by axis name, cannot stand in one case.
    compatible: Callable[[Mapping[str, Any]], bool]
    assemble: Callable[[Mapping[str, Any], int], Case]  # builds the case from one level of every axis and a seed
    strongest: int = 4  # the largest number of levels whose combinations are all covered, even at `standard` and `deep`

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return tuple(axis.name for axis in self.axes)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of levels of each axis."""
        return tuple(len(axis.levels) for axis in self.axes)

    def levels(self, row: tuple[int | None, ...]) -> dict[str, Any]:
        """Return the values of a row's level indices, by axis name, without axes that are still open (None)."""
        return {self.names[a]: self.axes[a].levels[level] for a, level in enumerate(row) if level is not None}
