"""Covering arrays: small sets of rows in which every feasible combination of `strength` levels occurs.

The greedy construction of the AETG family (Cohen et al., "The AETG system", IEEE TSE 23(7), 1997): seed each row with a
combination that is still missing, then give every other axis the level that covers most of what is missing. It is
deterministic: ties go to the lowest level index. Coverage is counted from the finished rows, never assumed.
"""

from __future__ import annotations

import dataclasses
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


def build(sizes: Sequence[int], strength: int, feasible: Feasible) -> list[Row]:
    """Rows over axes with `sizes[a]` levels each that cover every feasible `strength`-combination."""
    missing = dict.fromkeys(combinations(sizes, strength, feasible))
    rows: list[Row] = []
    while missing:
        seed = next(iter(missing))
        row = _complete(seed, sizes, strength, missing, feasible)
        if row is None:
            del missing[seed]  # its levels are compatible one by one, but no full row contains them all
            continue
        rows.append(row)
        for found in _contained(row, strength):
            missing.pop(found, None)
    return rows


def combinations(sizes: Sequence[int], strength: int, feasible: Feasible) -> list[Tuple]:
    """All combinations of `strength` levels of different axes that break no constraint."""
    found = []
    for axes in itertools.combinations(range(len(sizes)), strength):
        for levels in itertools.product(*(range(sizes[a]) for a in axes)):
            combination = tuple(zip(axes, levels, strict=True))
            if feasible(_partial(combination, len(sizes))):
                found.append(combination)
    return found


def coverage(rows: Iterable[Row], sizes: Sequence[int], strength: int, feasible: Feasible) -> Coverage:
    """Count the feasible combinations that `rows` contain.

    A combination that no full row can contain (its levels exclude each other through a third axis) is not feasible.
    """
    present = {found for row in rows for found in _contained(row, strength)}
    wanted = combinations(sizes, strength, feasible)
    possible = [c for c in wanted if c in present or _complete(c, sizes, strength, {}, feasible) is not None]
    return Coverage(strength, len(possible), sum(c in present for c in possible))


def _partial(combination: Tuple, axes: int) -> Partial:
    assigned = dict(combination)
    return tuple(assigned.get(a) for a in range(axes))


def _contained(row: Row, strength: int) -> Iterable[Tuple]:
    return itertools.combinations(tuple(enumerate(row)), strength)


def _complete(
    seed: Tuple, sizes: Sequence[int], strength: int, missing: dict[Tuple, None], feasible: Feasible
) -> Row | None:
    """A full row that contains `seed`, greedily covering `missing`; None if there is none. Larger axes go first."""
    order = sorted((a for a in range(len(sizes)) if a not in dict(seed)), key=lambda a: (-sizes[a], a))
    return _extend(_partial(seed, len(sizes)), order, sizes, strength, missing, feasible)


def _extend(
    partial: Partial,
    order: Sequence[int],
    sizes: Sequence[int],
    strength: int,
    missing: dict[Tuple, None],
    feasible: Feasible,
) -> Row | None:
    if not order:
        return tuple(level for level in partial if level is not None)
    axis, rest = order[0], order[1:]
    assigned = [(a, level) for a, level in enumerate(partial) if level is not None]

    def gain(level: int) -> int:
        if not missing:
            return 0
        others = itertools.combinations(assigned, strength - 1)
        return sum(tuple(sorted((*other, (axis, level)))) in missing for other in others)

    for level in sorted(range(sizes[axis]), key=lambda level: (-gain(level), level)):
        extended = (*partial[:axis], level, *partial[axis + 1 :])
        if feasible(extended):
            row = _extend(extended, rest, sizes, strength, missing, feasible)
            if row is not None:
                return row
    return None
