"""The fixed grid of cases: a covering array over the levels that an implementation supports.

Every pair of levels occurs at `quick`, every triple at `standard`, every quadruple at `deep`.

An implementation declines what it does not support, and says why. Levels that it declines stay out of the array: they
would make most of its rows unjudgeable. Each of them has one case of its own instead, which must be refused.

The base is the plainest case that an implementation supports. The rich case is the base with every optional operand
that it supports. A stand-in is a level that is asked only of implementations that decline another one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from cases import covering
from cases.axes import AXES, NAMES, assemble, compatible
from cases.case import Case
from cases.covering import Coverage, Partial, Row
from cases.operands import REMOVABLE

STRENGTH = {"quick": 2, "standard": 3, "deep": 4}
Supports = Callable[[Case], "str | None"]
"""Why a case is not supported, or None if it is."""

# The axes of `singles`, and those of the rich case, in the order in which their levels are tried.
_OPERAND_AXES = (*(operand.field for operand in REMOVABLE), "mask", "kv_cache", "own_window")
_RICH_AXES = ("mask", *(operand.field for operand in REMOVABLE), "heads", "depths")

_SIZES = tuple(len(axis.levels) for axis in AXES)


@dataclasses.dataclass(frozen=True)
class Grid:
    """The cases to judge, and the coverage that was achieved.

    Attributes:
      level: `quick`, `standard` or `deep`.
      cases: those of the covering array.
      rows: for each of `cases`, its level on every axis of `cases.axes.AXES`.
      singles: the base, then cases that have one optional operand or one mask more.
      rich: the rich case, if any case is supported.
      declined: one case for each level that is not supported.
      coverage: of the feasible combinations, how many some case has.
    """

    level: str
    cases: tuple[Case, ...]
    rows: tuple[Row, ...]
    singles: tuple[Case, ...]
    rich: tuple[Case, ...]
    declined: tuple[Case, ...]
    coverage: Coverage


def grid(level: str, seed: int, supports: Supports = lambda case: None) -> Grid:
    """The grid at `level` for an implementation that declines cases by `supports`."""
    support = _Support(supports, seed)
    matrix = support.matrix()
    rows, coverage = _rows(STRENGTH[level], matrix)
    cases: dict[Case, Row] = {}
    for row in rows:
        cases.setdefault(_case(row, seed), row)
    return Grid(
        level=level,
        cases=tuple(cases),
        rows=tuple(cases.values()),
        singles=_unique(support.singles()),
        rich=support.rich(),
        declined=_unique(support.declined()),
        coverage=coverage,
    )


def _unique(cases: list[Case]) -> tuple[Case, ...]:
    return tuple(dict.fromkeys(cases))


def _levels(row: Partial) -> dict[str, Any]:
    return {NAMES[a]: AXES[a].levels[level] for a, level in enumerate(row) if level is not None}


@functools.lru_cache(maxsize=1 << 14)
def _case(row: Row, seed: int) -> Case:
    """The case of a row. Kept, since every implementation's support is asked through the same few thousand cases."""
    return assemble(_levels(row), seed)


def _allowed(row: Partial) -> bool:
    return compatible(_levels(row))


Matrix = frozenset[tuple[tuple[int, int], tuple[int, int]]]
"""Pairs of `(axis, level)` that do not go together; a level with itself if it is not asked at all."""


@functools.lru_cache(maxsize=32)
def _rows(strength: int, excluded: Matrix) -> tuple[tuple[Row, ...], Coverage]:
    def feasible(partial: Partial) -> bool:
        assigned = [(a, level) for a, level in enumerate(partial) if level is not None]
        pairs = itertools.combinations_with_replacement(assigned, 2)
        return _allowed(partial) and not any(pair in excluded for pair in pairs)

    # A rare axis of which only the first level is left would only disturb the order in which rows are found.
    kept = [a for a, axis in enumerate(AXES) if not axis.rare or _supported(a, excluded)]
    sizes = [_SIZES[a] for a in kept]

    def whole(partial: Partial) -> Partial:
        levels = dict(zip(kept, partial, strict=True))
        return tuple(levels.get(a, 0) for a in range(len(AXES)))

    # Every level has the rows of `quick`: what is seen there is seen at all of them.
    start = [tuple(row[a] for a in kept) for row in _rows(strength - 1, excluded)[0]] if strength > 2 else []
    rows = covering.build(sizes, strength, lambda row: feasible(whole(row)), start=start, cheap=_cheap_among(kept))
    counted = covering.coverage(rows, sizes, strength, lambda partial: feasible(whole(partial)))
    return tuple(tuple(level or 0 for level in whole(row)) for row in rows), counted


def _cheap_among(kept: list[int]) -> int:
    return next(place for place, axis in enumerate(kept) if AXES[axis].cheap)


def _supported(axis: int, excluded: Matrix) -> bool:
    """Whether a level of the axis other than its first is supported."""
    return any(((axis, level),) * 2 not in excluded for level in range(1, _SIZES[axis]))


class _Support:
    """What an implementation supports, found out by cases that differ from the base in one or two levels."""

    def __init__(self, supports: Supports, seed: int) -> None:
        self._supports = supports
        self._seed = seed
        self._base = self._find_base()

    def matrix(self) -> Matrix:
        """What stays out of the array: unsupported levels, stand-ins for supported ones, other unsupported pairs."""
        items = [(a, level) for a, size in enumerate(_SIZES) for level in range(size)]
        single = {item for item in items if self._reason(item) is not None}
        stand_ins = ((a, pair) for a, axis in enumerate(AXES) for pair in axis.stand_ins())
        single |= {(a, level) for a, (level, other) in stand_ins if (a, other) not in single}
        excluded = {(item, item) for item in single}
        asked = [item for item in items if item not in single]
        for one, other in itertools.combinations(asked, 2):
            if one[0] != other[0] and self._reason(one, other) is not None:
                excluded.add((one, other))
        return frozenset(excluded)

    def singles(self) -> list[Case]:
        """The base, then one case for each supported level of the optional operands and the mask."""
        if self._supports(_case(self._base, self._seed)) is not None:
            return []
        axes = [NAMES.index(name) for name in _OPERAND_AXES]
        items = [(a, level) for a in axes for level in range(_SIZES[a]) if level != self._base[a]]
        return [_case(self._base, self._seed)] + [self._case(item) for item in items if self._reason(item) is None]

    def rich(self) -> tuple[Case, ...]:
        """The base with as many levels of a rich case as are supported together."""
        row = self._base
        for axis in map(NAMES.index, _RICH_AXES):
            moved = _moved(row, (axis, AXES[axis].levels.index(AXES[axis].rich)))
            if _allowed(moved) and self._supports(_case(moved, self._seed)) is None:
                row = moved
        case = _case(row, self._seed)
        return (case,) if self._supports(case) is None else ()

    def declined(self) -> list[Case]:
        """One case for each level that is not supported."""
        items = ((a, level) for a, size in enumerate(_SIZES) for level in range(size))
        return [self._case(item) for item in items if self._reason(item) is not None]

    def _find_base(self) -> Row:
        """The base: the first level of every axis if that is supported, else with other levels on one axis or two."""
        plain = (0,) * len(_SIZES)
        items = [(a, level) for a, size in enumerate(_SIZES) for level in range(size)]
        for moves in itertools.chain(((),), ((i,) for i in items), itertools.combinations(items, 2)):
            row = _moved(plain, *moves)
            if _allowed(row) and self._supports(_case(row, self._seed)) is None:
                return row
        return plain

    @functools.cache  # noqa: B019 -- the object lives as long as one call of `grid`
    def _reason(self, *items: tuple[int, int]) -> str | None:
        reasons = [self._supports(case) for case in self._candidates(*items)]
        return None if None in reasons or not reasons else reasons[0]

    def _case(self, item: tuple[int, int]) -> Case:
        cases = self._candidates(item)
        if not cases:
            raise ValueError(f"no case has level {AXES[item[0]].levels[item[1]]!r} of axis {NAMES[item[0]]}")
        return next((case for case in cases if self._supports(case) is None), cases[0])

    def _candidates(self, *items: tuple[int, int]) -> list[Case]:
        """Cases with the levels `items`, otherwise as plain as they allow."""
        return [_case(row, self._seed) for row in _candidates(self._base, items)]


@functools.lru_cache(maxsize=1 << 14)
def _candidates(base: Row, items: tuple[tuple[int, int], ...]) -> tuple[Row, ...]:
    """Rows with the levels `items`, otherwise as `base` as far as they allow.

    Kept, since most implementations have the same base, and mending a row tries a thousand others.
    """
    row = _moved(base, *items)
    rows = _repaired(row, dict(items))
    if not rows and len(items) == 1:
        rows = _repaired(row, dict(items), moves=2)
    return tuple(rows)


def _moved(row: Row, *items: tuple[int, int]) -> Row:
    moved = dict(items)
    return tuple(moved.get(a, level) for a, level in enumerate(row))


def _repaired(row: Row, fixed: Mapping[int, int], moves: int = 1) -> list[Row]:
    """The row. If its levels exclude each other, all rows that mend it on `moves` axes: a knee needs a cap."""
    if _allowed(row):
        return [row]
    free = [axis for axis in range(len(_SIZES)) if axis not in fixed]
    candidates = (
        _moved(row, *zip(axes, levels, strict=True))
        for axes in itertools.combinations(free, moves)
        for levels in itertools.product(*(range(_SIZES[axis]) for axis in axes))
    )
    return [candidate for candidate in candidates if _allowed(candidate)]
