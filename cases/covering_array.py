"""Build covering arrays: small sets of rows in which every feasible combination of `strength` levels occurs.

The construction is greedy, of the AETG family (Cohen et al., "The AETG system", IEEE TSE 23(7), 1997). Each row is
seeded with a combination that is still missing. Every other axis then gets the level that covers most of what is
missing. It is deterministic: ties go to the lowest level index. Coverage is counted from the finished rows, never
assumed.

One axis may be cheap: rows that differ only on this axis share their expensive part, such as a compiled program. The
cost is then the number of rows that differ on another axis. So rows are first built without the cheap axis, and get its
levels afterwards. `cases.grid` turns rows into cases.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence

Row = tuple[int, ...]
"""One level index for each axis."""
Partial = tuple[int | None, ...]
"""An incomplete row; None for an axis that is still open."""
Tuple = tuple[tuple[int, int], ...]
"""A combination: `(axis, level)` pairs in the order of the axes."""
Feasible = Callable[[Partial], bool]
"""A function that returns False if the assigned axes of an incomplete row already break a constraint."""


@dataclasses.dataclass(frozen=True)
class Coverage:
    """The number of feasible combinations of `strength` levels, and how many of these some row contains."""

    strength: int
    feasible: int
    covered: int


def build_rows(
    sizes: Sequence[int],
    strength: int,
    feasible: Feasible,
    *,
    start: Sequence[Row] = (),
    cheap: int | None = None,
) -> list[Row]:
    """Build rows that cover every feasible combination of `strength` levels.

    Args:
      start: rows that exist already; they are part of the result.
      cheap: index of the cheap axis. Rows preferably differ on it, rather than on another axis.

    Returns:
      The rows, with those of `start`. Rows that differ only on the cheap axis stand together.
    """
    missing = dict.fromkeys(list_combinations(sizes, strength, feasible))
    rows = list(start)
    _remove(missing, (found for row in rows for found in _iter_combinations(row, strength)))
    if cheap is not None:
        bases = _build_bases(sizes, strength, feasible, rows, cheap)
        rows += _add_cheap_levels(bases, rows, sizes, strength, missing, feasible, cheap)
    while missing:
        seed = next(iter(missing))
        row = _complete(seed, sizes, strength, missing, feasible)
        if row is None:
            del missing[seed]  # no constraint excludes it, but no full row contains it
            continue
        rows.append(row)
        _remove(missing, _iter_combinations(row, strength))
    return rows if cheap is None else _group_rows(rows, cheap)


def _build_bases(
    sizes: Sequence[int], strength: int, feasible: Feasible, start: Sequence[Row], cheap: int
) -> list[Partial]:
    """Build rows, with the cheap axis open, that include `start` and cover all combinations of the other axes."""

    def insert_open_axis(partial: Partial) -> Partial:
        """Insert the open cheap axis into a row of the other axes."""
        return (*partial[:cheap], None, *partial[cheap:])

    def is_completable(partial: Partial) -> bool:
        """Return whether some level of the cheap axis makes the row feasible."""
        whole = insert_open_axis(partial)
        if not feasible(whole):
            return False
        return None in partial or any(feasible(_set_level(whole, cheap, level)) for level in range(sizes[cheap]))

    fewer = [size for axis, size in enumerate(sizes) if axis != cheap]
    given = list(dict.fromkeys((*row[:cheap], *row[cheap + 1 :]) for row in start))
    return [insert_open_axis(row) for row in build_rows(fewer, strength, is_completable, start=given)]


def _add_cheap_levels(
    bases: Sequence[Partial],
    start: Sequence[Row],
    sizes: Sequence[int],
    strength: int,
    missing: dict[Tuple, None],
    feasible: Feasible,
    cheap: int,
) -> list[Row]:
    """Complete each base with at least one level of the cheap axis, and with more levels that cover something new."""

    def count_gain(row: Row) -> int:
        """Count the missing combinations that the row covers."""
        return sum(found in missing for found in _iter_combinations(row, strength))

    def take(row: Row) -> None:
        """Add the row, and remove what it covers from the missing combinations."""
        rows.append(row)
        _remove(missing, _iter_combinations(row, strength))

    rows: list[Row] = []
    begun = {_set_level(row, cheap, None) for row in start}
    choices = []
    for base in bases:
        possible = [
            _drop_open_axes(whole) for n in range(sizes[cheap]) if feasible(whole := _set_level(base, cheap, n))
        ]
        if base not in begun:
            take(max(possible, key=count_gain))
        choices += possible
    # The gain of a row never grows. So if the first row of the queue still has the gain it was queued with, it is best.
    queue = [(-count_gain(row), row) for row in choices]
    heapq.heapify(queue)
    while queue and missing:
        before, row = heapq.heappop(queue)
        if now := count_gain(row):
            if now == -before:
                take(row)
            else:
                heapq.heappush(queue, (-now, row))
    return rows


def _group_rows(rows: Sequence[Row], cheap: int) -> list[Row]:
    """Reorder rows so that rows that differ only on the cheap axis stand together."""
    groups: dict[Partial, list[Row]] = {}
    for row in rows:
        groups.setdefault(_set_level(row, cheap, None), []).append(row)
    return [row for group in groups.values() for row in group]


def list_combinations(sizes: Sequence[int], strength: int, feasible: Feasible) -> list[Tuple]:
    """List all combinations of `strength` levels of different axes that break no constraint."""
    found = []
    for axes in itertools.combinations(range(len(sizes)), strength):
        for levels in itertools.product(*(range(sizes[a]) for a in axes)):
            combination = tuple(zip(axes, levels, strict=True))
            if feasible(_assign_levels(combination, len(sizes))):
                found.append(combination)
    return found


def count_coverage(rows: Iterable[Row], sizes: Sequence[int], strength: int, feasible: Feasible) -> Coverage:
    """Count the feasible combinations that `rows` contain.

    A combination counts as feasible only if some complete row contains it. Its levels may be allowed together and yet
    leave no level allowed for another axis.
    """
    present = {found for row in rows for found in _iter_combinations(row, strength)}
    wanted = list_combinations(sizes, strength, feasible)
    possible = [c for c in wanted if c in present or _complete(c, sizes, strength, {}, feasible) is not None]
    return Coverage(strength, len(possible), sum(c in present for c in possible))


def _assign_levels(combination: Tuple, axes: int) -> Partial:
    """Return the incomplete row that has the levels of a combination, with all other axes open."""
    assigned = dict(combination)
    return tuple(assigned.get(a) for a in range(axes))


def _iter_combinations(row: Row, strength: int) -> Iterable[Tuple]:
    """Iterate over the combinations of `strength` levels that a row contains."""
    return itertools.combinations(tuple(enumerate(row)), strength)


def _remove(missing: dict[Tuple, None], found: Iterable[Tuple]) -> None:
    """Remove the found combinations from the missing ones."""
    for combination in found:
        missing.pop(combination, None)


def _set_level(row: Partial, axis: int, level: int | None) -> Partial:
    """Return the row with another level on one axis."""
    return (*row[:axis], level, *row[axis + 1 :])


def _drop_open_axes(row: Partial) -> Row:
    """Return the levels of a row without those of open axes (None)."""
    return tuple(level for level in row if level is not None)


def _complete(
    seed: Tuple, sizes: Sequence[int], strength: int, missing: dict[Tuple, None], feasible: Feasible
) -> Row | None:
    """Complete `seed` to a row that greedily covers `missing`, larger axes first; None if no row contains `seed`."""
    order = sorted((a for a in range(len(sizes)) if a not in dict(seed)), key=lambda a: (-sizes[a], a))
    return _extend(_assign_levels(seed, len(sizes)), order, sizes, strength, missing, feasible)


def _extend(
    partial: Partial,
    order: Sequence[int],
    sizes: Sequence[int],
    strength: int,
    missing: dict[Tuple, None],
    feasible: Feasible,
) -> Row | None:
    """Assign the axes of `order`, backtracking where a constraint leaves no level."""
    if not order:
        return _drop_open_axes(partial)
    axis, rest = order[0], order[1:]
    assigned = [(a, level) for a, level in enumerate(partial) if level is not None]

    def count_gain(level: int) -> int:
        """Count the missing combinations that this level of the axis covers."""
        if not missing:
            return 0
        others = itertools.combinations(assigned, strength - 1)
        return sum(tuple(sorted((*other, (axis, level)))) in missing for other in others)

    for level in sorted(range(sizes[axis]), key=lambda level: (-count_gain(level), level)):
        extended = _set_level(partial, axis, level)
        if feasible(extended):
            row = _extend(extended, rest, sizes, strength, missing, feasible)
            if row is not None:
                return row
    return None
