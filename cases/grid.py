"""Build the grid, the fixed set of cases on which an implementation is judged: a covering array over what it supports.

A model (`cases.covering_model`) has axes such as mask, dtype and length, each with a few levels. Every pair of levels
occurs in a case at `quick`, every triple at `standard`, every quadruple at `deep`, unless the model stops at a smaller
number (`Model.strongest`).

An implementation declines what it does not support, and says why. Declined levels stay out of the array, since they
would make most of its rows impossible to judge. Each has one case of its own instead, which the kernel must refuse.

The base is the plainest case that an implementation supports. The combined case is the base with every optional operand
that the implementation supports. Beyond `quick` there is a second combined case, with another dtype, other sizes and
other shapes of operands, as far as these are supported. Checks that run on combined cases only then run on two cases
that share no compiled program. A stand-in is a level that replaces another one for implementations that decline that
one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Mapping

from cases import covering_array, feature_model
from cases.case import Case
from cases.covering_array import Coverage, Partial, Row
from cases.covering_model import Model
from cases.operand_registry import ABSENCE_IGNORED, REMOVABLE

STRENGTH = {"quick": 2, "standard": 3, "deep": 4}
Supports = Callable[[Case], "str | None"]
"""A function that returns why a case is not supported, or None if it is supported."""

# Axes that only the models of storage forms have, and that are neither shapes nor operands.
_STORAGE_AXES = ("window", "page", "shared")
# The axes that the cases of `Grid.singles` vary: arguments that a call may have or lack.
_ARGUMENT_AXES = (*(operand.field for operand in REMOVABLE), "mask", "own_window", "window")
# The axes above, and those that change only how operands are stored: the type of a cache, the size of its pages, pages
# that sequences share.
_OPERAND_AXES = (*_ARGUMENT_AXES, "kv_cache", *(axis for axis in _STORAGE_AXES if axis not in _ARGUMENT_AXES))
# The axes on which the second and the first combined case differ from the base, in the order in which levels are tried.
_SECOND_AXES = ("dtype", "heads", "depths", "bias", "segments", "soft_cap")
_COMBINED_AXES = ("mask", *(operand.field for operand in REMOVABLE), "heads", "depths", *_STORAGE_AXES)


@dataclasses.dataclass(frozen=True)
class Grid:
    """The cases to judge, and the coverage that they achieve.

    Attributes:
      level: `quick`, `standard` or `deep`.
      cases: the cases of the covering array.
      rows: for each of `cases`, its level on every axis of the model.
      singles: the base, then cases with one more optional operand or one other mask.
      combined: the combined case, if any case is supported, and beyond `quick` a second one.
      declined: one case for each level that is not supported.
      coverage: how many of the feasible combinations some case has.
      varied: the indices of the axes that the covering array varies.
      weighed: the indices of the axes on whose levels checks are distributed evenly among cases.
      parted: counts for pairs of optional operands, masks and storage forms of which each is supported on its own: how
        many pairs are not supported together, and how many pairs there are.
    """

    level: str
    cases: tuple[Case, ...]
    rows: tuple[Row, ...]
    singles: tuple[Case, ...]
    combined: tuple[Case, ...]
    declined: tuple[Case, ...]
    coverage: Coverage
    varied: tuple[int, ...]
    weighed: tuple[int, ...]
    parted: tuple[int, int]

    def count_covered_by(self, cases: Collection[Case]) -> int:
        """Count the combinations of levels that the given cases cover. Cases outside of the grid are ignored."""
        rows = (row for case, row in zip(self.cases, self.rows, strict=True) if case in cases)
        chosen = (tuple((axis, row[axis]) for axis in self.varied) for row in rows)
        return len({found for row in chosen for found in itertools.combinations(row, self.coverage.strength)})


def build_grid(
    level: str, seed: int, supports: Supports = lambda case: None, model: Model = feature_model.MODEL
) -> Grid:
    """Build the grid at `level` for an implementation.

    Args:
      level: `quick`, `standard` or `deep`.
      seed: the seed of the cases.
      supports: returns why a case is not supported, or None if it is.
      model: the axes and levels that the array covers.
    """
    support = _Support(supports, seed, model)
    matrix = support.build_matrix()
    rows, coverage = _build_rows(min(STRENGTH[level], model.strongest), matrix, model)
    cases: dict[Case, Row] = {}
    for row in rows:
        cases.setdefault(_build_case(row, seed, model), row)
    varied = _find_varied_axes(matrix, model)
    return Grid(
        level=level,
        cases=tuple(cases),
        rows=tuple(cases.values()),
        singles=_deduplicate(support.list_singles()),
        combined=support.list_combined()[: 1 if level == "quick" else 2],
        declined=_deduplicate(support.list_declined()),
        coverage=coverage,
        varied=varied,
        weighed=tuple(a for a, axis in enumerate(model.axes) if a in varied or axis.name not in ABSENCE_IGNORED),
        parted=_count_unsupported_pairs(matrix, model),
    )


def _count_unsupported_pairs(excluded: Matrix, model: Model) -> tuple[int, int]:
    """Count the pairs of levels that are not supported together, and all pairs, for `Grid.parted`.

    Only levels of operands, masks and storage forms count, and only levels that are supported on their own.
    """
    axes_of_operands = [a for a, name in enumerate(model.names) if name in _OPERAND_AXES]
    items = [(a, level) for a in axes_of_operands for level in range(1, model.sizes[a])]
    asked = [item for item in items if (item, item) not in excluded]
    pairs = [(one, other) for one, other in itertools.combinations(asked, 2) if one[0] != other[0]]
    return sum(pair in excluded for pair in pairs), len(pairs)


def _deduplicate(cases: list[Case]) -> tuple[Case, ...]:
    """Return the cases without repetitions."""
    return tuple(dict.fromkeys(cases))


@functools.lru_cache(maxsize=1 << 14)
def _build_case(row: Row, seed: int, model: Model) -> Case:
    """Build the case of a row; cached, since every implementation is asked about the same few thousand cases."""
    return model.assemble(model.levels(row), seed)


Matrix = frozenset[tuple[tuple[int, int], tuple[int, int]]]
"""Pairs of `(axis, level)` that are excluded; a level paired with itself is excluded altogether."""


@functools.lru_cache(maxsize=32)
def _build_rows(strength: int, excluded: Matrix, model: Model) -> tuple[tuple[Row, ...], Coverage]:
    """Build the rows of the array, and count what they cover."""

    @functools.cache  # called while rows are built, and again for the same rows while coverage is counted
    def is_feasible(partial: Partial) -> bool:
        """Return whether no pair of the assigned levels is excluded."""
        assigned = [(a, level) for a, level in enumerate(partial) if level is not None]
        pairs = itertools.combinations_with_replacement(assigned, 2)
        return excluded.isdisjoint(pairs) and _is_allowed(partial, model)

    kept = _find_varied_axes(excluded, model)
    sizes = [model.sizes[a] for a in kept]

    def fill_row(partial: Partial) -> Partial:
        """Return the full row: axes that the array does not vary get their first level."""
        levels = dict(zip(kept, partial, strict=True))
        return tuple(levels.get(a, 0) for a in range(len(model.axes)))

    # Each larger set starts with the rows of the next smaller one, so that a failure at `quick` occurs at all levels.
    start = (
        [tuple(row[a] for a in kept) for row in _build_rows(strength - 1, excluded, model)[0]] if strength > 2 else []
    )
    cheap = next(place for place, axis in enumerate(kept) if model.axes[axis].cheap)
    rows = covering_array.build_rows(sizes, strength, lambda row: is_feasible(fill_row(row)), start=start, cheap=cheap)
    counted = covering_array.count_coverage(rows, sizes, strength, lambda partial: is_feasible(fill_row(partial)))
    return tuple(tuple(level or 0 for level in fill_row(row)) for row in rows), counted


def _find_varied_axes(excluded: Matrix, model: Model) -> tuple[int, ...]:
    """Find the axes that the array varies.

    A rare axis of which only the first level is supported is left out: with it, rows would be found in another order.
    """
    return tuple(a for a, axis in enumerate(model.axes) if not axis.rare or _has_supported_level(a, excluded, model))


def _has_supported_level(axis: int, excluded: Matrix, model: Model) -> bool:
    """Return whether a level of the axis other than its first is supported."""
    return any(((axis, level),) * 2 not in excluded for level in range(1, model.sizes[axis]))


class _Support:
    """The levels that an implementation supports, found with cases that differ from the base in one or two levels."""

    def __init__(self, supports: Supports, seed: int, model: Model) -> None:
        self._supports = supports
        self._seed = seed
        self._model = model
        self._items = [(a, level) for a, size in enumerate(model.sizes) for level in range(size)]
        self._base = self._find_base()

    def build_matrix(self) -> Matrix:
        """Return the pairs of levels to exclude: unsupported levels, stand-ins of supported ones, unsupported pairs."""
        single = {item for item in self._items if self._find_refusal(item) is not None}
        stand_ins = ((a, pair) for a, axis in enumerate(self._model.axes) for pair in axis.list_stand_ins())
        single |= {(a, level) for a, (level, other) in stand_ins if (a, other) not in single}
        excluded = {(item, item) for item in single}
        asked = [item for item in self._items if item not in single]
        for one, other in itertools.combinations(asked, 2):
            if one[0] != other[0] and self._find_refusal(one, other) is not None:
                excluded.add((one, other))
        return frozenset(excluded)

    def list_singles(self) -> list[Case]:
        """Return the base, then one case for each supported level of the optional operands and the mask."""
        base = _build_case(self._base, self._seed, self._model)
        if self._supports(base) is not None:
            return []
        order = [self._model.names.index(name) for name in _ARGUMENT_AXES if name in self._model.names]
        items = [
            (a, level)
            for a in order
            for level, value in enumerate(self._model.axes[a].levels)
            if level != self._base[a] and value is not None
        ]
        return [base] + [self._find_case(item) for item in items if self._find_refusal(item) is None]

    def list_combined(self) -> tuple[Case, ...]:
        """Return up to two combined cases: the base with as many combined levels as are supported, and a variant of it.

        The variant has other levels on the axes of `_SECOND_AXES`.
        """
        row = self._base
        for place in (self._model.names.index(name) for name in _COMBINED_AXES if name in self._model.names):
            axis = self._model.axes[place]
            if axis.combined is None:
                continue
            moved = _replace_levels(row, (place, axis.levels.index(axis.combined)))
            row = moved if self._is_supported(moved) else row
        if not self._is_supported(row):
            return ()
        second = row
        for place in (self._model.names.index(name) for name in _SECOND_AXES if name in self._model.names):
            plain = (self._base[place], row[place])
            levels = (level for level in range(self._model.sizes[place]) if level not in plain)
            moves = (_replace_levels(second, (place, level)) for level in levels)
            second = next(filter(self._is_supported, moves), second)
        return _deduplicate([_build_case(one, self._seed, self._model) for one in (row, second)])

    def _is_supported(self, row: Row) -> bool:
        """Return whether the model allows the row and the implementation supports its case."""
        return _is_allowed(row, self._model) and self._supports(_build_case(row, self._seed, self._model)) is None

    def list_declined(self) -> list[Case]:
        """Return one case for each unsupported level, except for stand-ins: the level that they replace has a case."""
        stand_ins = {(a, level) for a, axis in enumerate(self._model.axes) for level, _ in axis.list_stand_ins()}
        items = (item for item in self._items if item not in stand_ins)
        return [self._find_case(item) for item in items if self._find_refusal(item) is not None]

    def _find_base(self) -> Row:
        """Find the base: the first level of every axis if supported, else with other levels on one or two axes."""
        plain = (0,) * len(self._model.axes)
        items = self._items
        for moves in itertools.chain(((),), ((i,) for i in items), itertools.combinations(items, 2)):
            row = _replace_levels(plain, *moves)
            if self._is_supported(row):
                return row
        return plain

    @functools.cache  # noqa: B019 -- the object lives only during one call of `build_grid`
    def _find_refusal(self, *items: tuple[int, int]) -> str | None:
        """Return why no case with these levels is supported, or None if one is."""
        reasons = [self._supports(case) for case in self._list_candidates(*items)]
        return None if None in reasons or not reasons else reasons[0]

    def _find_case(self, item: tuple[int, int]) -> Case:
        """Return a case with this level; a supported case if there is one."""
        cases = self._list_candidates(item)
        if not cases:
            axis = self._model.axes[item[0]]
            raise ValueError(f"no case has level {axis.levels[item[1]]!r} of axis {axis.name}")
        return next((case for case in cases if self._supports(case) is None), cases[0])

    def _list_candidates(self, *items: tuple[int, int]) -> list[Case]:
        """List cases with these levels that are otherwise as plain as the levels allow."""
        return [_build_case(row, self._seed, self._model) for row in _find_candidates(self._base, items, self._model)]


@functools.lru_cache(maxsize=1 << 14)
def _find_candidates(base: Row, items: tuple[tuple[int, int], ...], model: Model) -> tuple[Row, ...]:
    """Find rows with these levels that are otherwise like `base`, as far as the levels allow.

    Cached: most implementations have the same base, and `_repair_row` tries about a thousand other rows.
    """
    row = _replace_levels(base, *items)
    rows = _repair_row(row, dict(items), model)
    if not rows and len(items) == 1:
        rows = _repair_row(row, dict(items), model, moves=2)
    return tuple(rows)


def _replace_levels(row: Row, *items: tuple[int, int]) -> Row:
    """Return the row with the levels of the given `(axis, level)` pairs."""
    moved = list(row)
    for axis, level in items:
        moved[axis] = level
    return tuple(moved)


@functools.lru_cache(maxsize=1 << 16)
def _is_allowed(row: Partial, model: Model) -> bool:
    """Return whether the model allows the row."""
    return model.compatible(model.levels(row))


def _repair_row(row: Row, fixed: Mapping[int, int], model: Model, moves: int = 1) -> list[Row]:
    """Return the row if the model allows it, otherwise all allowed rows that differ from it on `moves` axes.

    The levels of `fixed` stay. For example, values at the knee of a soft cap need a soft cap.
    """
    if _is_allowed(row, model):
        return [row]
    free = [axis for axis in range(len(model.axes)) if axis not in fixed]
    candidates = (
        _replace_levels(row, *zip(axes, levels, strict=True))
        for axes in itertools.combinations(free, moves)
        for levels in itertools.product(*(range(model.sizes[axis]) for axis in axes))
    )
    return [candidate for candidate in candidates if _is_allowed(candidate, model)]
