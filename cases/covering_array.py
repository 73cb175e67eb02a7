"""Covering arrays: small sets of rows in which every feasible combination of `strength` levels occurs.

The greedy construction of the AETG family (Cohen et al., "The AETG system", IEEE TSE 23(7), 1997): seed each row with a
combination that is still missing, then give every other axis the level that covers most of what is missing. It is
deterministic: ties go to the lowest level index. Coverage is counted from the finished rows, never assumed.

One axis may be cheap: rows that differ in it alone share what is dear about a row. Then the number of rows that differ
in another axis is what counts. So rows are built without the cheap axis first, and get its levels afterwards.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence

Row = tuple[int, ...]
"""One level index an axis."""
Partial = tuple[int | None, ...]
"""A row in the making; None for an axis that is still open."""
Tuple = tuple[tuple[int, int], ...]
"""A combination: `(axis, level)` pairs in the order of the axes."""
Feasible = Callable[[Partial], bool]
"""False if the assigned axes already break a constraint."""


@dataclasses.dataclass(frozen=True)
class Coverage:
    """How many feasible combinations there are, and how many of them some row contains."""

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
    """Rows over axes with `sizes[a]` levels each that cover every feasible `strength`-combination.

    Args:
      sizes: levels of each axis.
      strength: how many axes a combination is of.
      feasible: the constraints.
      start: rows that are there already.
      cheap: an axis that rows are to differ in, rather than in another.

    Returns:
      The rows, those of `start` among them; rows that differ in the cheap axis alone stand together.
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
            del missing[seed]  # its levels are compatible one by one, but no full row contains them all
            continue
        rows.append(row)
        _remove(missing, _iter_combinations(row, strength))
    return rows if cheap is None else _group_rows(rows, cheap)


def _build_bases(
    sizes: Sequence[int], strength: int, feasible: Feasible, start: Sequence[Row], cheap: int
) -> list[Partial]:
    """Rows with the cheap axis open that cover what can be covered without it, those of `start` among them."""

    def opened(partial: Partial) -> Partial:
        return (*partial[:cheap], None, *partial[cheap:])

    def completable(partial: Partial) -> bool:
        whole = opened(partial)
        if not feasible(whole):
            return False
        return None in partial or any(feasible(_set_level(whole, cheap, level)) for level in range(sizes[cheap]))

    fewer = [size for axis, size in enumerate(sizes) if axis != cheap]
    given = list(dict.fromkeys((*row[:cheap], *row[cheap + 1 :]) for row in start))
    return [opened(row) for row in build_rows(fewer, strength, completable, start=given)]


def _add_cheap_levels(
    bases: Sequence[Partial],
    start: Sequence[Row],
    sizes: Sequence[int],
    strength: int,
    missing: dict[Tuple, None],
    feasible: Feasible,
    cheap: int,
) -> list[Row]:
    """The bases, each with as many levels of the cheap axis as cover something new, but one at least."""

    def gain(row: Row) -> int:
        return sum(found in missing for found in _iter_combinations(row, strength))

    def take(row: Row) -> None:
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
            take(max(possible, key=gain))
        choices += possible
    # Gains only fall: what was best when last looked at, and still has that gain, is best.
    queue = [(-gain(row), row) for row in choices]
    heapq.heapify(queue)
    while queue and missing:
        before, row = heapq.heappop(queue)
        if now := gain(row):
            if now == -before:
                take(row)
            else:
                heapq.heappush(queue, (-now, row))
    return rows


def _group_rows(rows: Sequence[Row], cheap: int) -> list[Row]:
    groups: dict[Partial, list[Row]] = {}
    for row in rows:
        groups.setdefault(_set_level(row, cheap, None), []).append(row)
    return [row for group in groups.values() for row in group]


def list_combinations(sizes: Sequence[int], strength: int, feasible: Feasible) -> list[Tuple]:
    """All combinations of `strength` levels of different axes that break no constraint."""
    found = []
    for axes in itertools.combinations(range(len(sizes)), strength):
        for levels in itertools.product(*(range(sizes[a]) for a in axes)):
            combination = tuple(zip(axes, levels, strict=True))
            if feasible(_assign_levels(combination, len(sizes))):
                found.append(combination)
    return found


def count_coverage(rows: Iterable[Row], sizes: Sequence[int], strength: int, feasible: Feasible) -> Coverage:
    """Count the feasible combinations that `rows` contain.

    A combination that no full row can contain (its levels exclude each other through a third axis) is not feasible.
    """
    present = {found for row in rows for found in _iter_combinations(row, strength)}
    wanted = list_combinations(sizes, strength, feasible)
    possible = [c for c in wanted if c in present or _complete(c, sizes, strength, {}, feasible) is not None]
    return Coverage(strength, len(possible), sum(c in present for c in possible))


def _assign_levels(combination: Tuple, axes: int) -> Partial:
    assigned = dict(combination)
    return tuple(assigned.get(a) for a in range(axes))


def _iter_combinations(row: Row, strength: int) -> Iterable[Tuple]:
    return itertools.combinations(tuple(enumerate(row)), strength)


def _remove(missing: dict[Tuple, None], found: Iterable[Tuple]) -> None:
    for combination in found:
        missing.pop(combination, None)


def _set_level(row: Partial, axis: int, level: int | None) -> Partial:
    return (*row[:axis], level, *row[axis + 1 :])


def _drop_open_axes(row: Partial) -> Row:
    return tuple(level for level in row if level is not None)


def _complete(
    seed: Tuple, sizes: Sequence[int], strength: int, missing: dict[Tuple, None], feasible: Feasible
) -> Row | None:
    """A full row that contains `seed`, greedily covering `missing`; None if there is none. Larger axes go first."""
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
    if not order:
        return _drop_open_axes(partial)
    axis, rest = order[0], order[1:]
    assigned = [(a, level) for a, level in enumerate(partial) if level is not None]

    def gain(level: int) -> int:
        if not missing:
            return 0
        others = itertools.combinations(assigned, strength - 1)
        return sum(tuple(sorted((*other, (axis, level)))) in missing for other in others)

    for level in sorted(range(sizes[axis]), key=lambda level: (-gain(level), level)):
        extended = _set_level(partial, axis, level)
        if feasible(extended):
            row = _extend(extended, rest, sizes, strength, missing, feasible)
            if row is not None:
                return row
    return None
