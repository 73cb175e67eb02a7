"""Taking turns: each case is given one of a few alternatives, and each alternative falls to as many cases as any other.

That holds of all cases together. As far as possible it also holds of the cases of each level of each axis, so that all
pairs of an alternative and a level occur equally often. What is made small is the sum of squares of these counts, as in
the minimisation of clinical trials (Pocock and Simon, "Sequential treatment assignment with balancing for prognostic
factors in the controlled clinical trial", Biometrics 31(1), 1975). Unlike patients, cases do not come one at a time, so
alternatives may be exchanged afterwards. Nothing is random: ties go to what comes first.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence

import numpy as np

# In the grids of three implementations, eight starts instead of one make the sum of squares less by 10 to 264 for the
# choice that cases share, and 64 by another 4 to 8 at eight times the cost.
_STARTS = 8


def assign(
    levels: Sequence[tuple[Hashable, ...]],
    allowed: Sequence[tuple[int, ...]],
    *,
    count: int,
    together: Sequence[Hashable] | None = None,
    first: int = 0,
) -> tuple[int | None, ...]:
    """One alternative of `0..count - 1` for each case.

    Args:
      levels: of each case, its level on each axis.
      allowed: of each case, the alternatives that it can take; none if the choice means nothing to it.
      count: how many alternatives there are.
      together: cases of the same label take the same alternative, one that all of them can take; by default each case
        takes its own.
      first: the alternative that goes first. Another one gives another assignment that is as even.

    Returns:
      An alternative for each case, None for those that can take none.

    Raises:
      ValueError: if cases that go together have no alternative in common.
    """
    labels = tuple(range(len(levels))) if together is None else tuple(together)
    return _assign(tuple(levels), tuple(allowed), count, labels, first % count)


@functools.lru_cache(maxsize=256)
def _assign(
    levels: tuple[tuple[Hashable, ...], ...],
    allowed: tuple[tuple[int, ...], ...],
    count: int,
    together: tuple[Hashable, ...],
    first: int,
) -> tuple[int | None, ...]:
    """`assign`, kept: implementations that support the same have the same cases."""
    groups: dict[Hashable, list[int]] = {}
    for case, possible in enumerate(allowed):
        if possible:
            groups.setdefault(together[case], []).append(case)
    if not groups:
        return (None,) * len(levels)
    can = np.zeros((len(groups), count), bool)
    for group, members in enumerate(groups.values()):
        common = set.intersection(*(set(allowed[case]) for case in members))
        if not common:
            raise ValueError(f"cases that go together have no alternative in common: {[allowed[c] for c in members]}")
        can[group, [(alternative - first) % count for alternative in common]] = True
    taken = _find_most_even(_compute_products(levels, list(groups.values())), can)
    found: list[int | None] = [None] * len(levels)
    for members, alternative in zip(groups.values(), taken, strict=True):
        for case in members:
            found[case] = int(alternative + first) % count
    return tuple(found)


def _compute_products(levels: Sequence[tuple[Hashable, ...]], groups: Sequence[Sequence[int]]) -> np.ndarray:
    """What two groups add to the sum of squares if they take the same alternative, each for its part `[G, G]`.

    It is the number of cases that the one has at a level times that of the other, over all levels of all axes. That
    they are two groups counts as much as if they met on every axis: groups are dear. That they are so many cases counts
    for more than all else can: cases are even first.
    """
    places: dict[tuple[int, Hashable], int] = {}
    for members in groups:
        for case in members:
            for item in enumerate(levels[case]):
                places.setdefault(item, len(places))
    present = np.zeros((len(groups), len(places)), np.int64)
    for group, members in enumerate(groups):
        for case in members:
            for item in enumerate(levels[case]):
                present[group, places[item]] += 1
    axes = len(levels[groups[0][0]])
    sizes = np.array([len(members) for members in groups], np.int64)
    above = 1 + 2 * axes * int(sizes.sum()) ** 2
    found: np.ndarray = present @ present.T + axes + above * np.outer(sizes, sizes)
    return found


def _find_most_even(products: np.ndarray, can: np.ndarray) -> np.ndarray:
    """The alternative of each group `[G]`, the best of what is found from several starts."""
    orders = (np.roll(np.arange(len(can)), -start * len(can) // _STARTS) for start in range(_STARTS))
    found = [_improve_assignment(products, can, _assign_greedily(products, can, order)) for order in orders]
    return min(found, key=lambda taken: _sum_squares(products, taken))


def _sum_squares(products: np.ndarray, taken: np.ndarray) -> int:
    """The sum of squares."""
    return int(products[taken[:, None] == taken].sum())


def _assign_greedily(products: np.ndarray, can: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Each group, those with the fewest alternatives first, takes the one that leaves the counts most even."""
    taken = np.full(len(can), -1)
    for group in sorted(order, key=lambda group: int(can[group].sum())):
        possible = np.flatnonzero(can[group])
        taken[group] = min(possible, key=lambda alternative: int(products[group, taken == alternative].sum()))
    return taken


def _improve_assignment(products: np.ndarray, can: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """Groups take another alternative, or two exchange theirs, the best of these changes first, while that helps."""
    alternatives = np.arange(can.shape[1])
    alone = np.diagonal(products)
    apart = alone[:, None] + alone - 2 * products
    taken = taken.copy()
    while True:
        # What each change adds to the sum of squares, halved; below zero it helps.
        with_all = products @ (taken[:, None] == alternatives)  # [G, A]
        before = np.take_along_axis(with_all, taken[:, None], axis=1)
        moved = np.where(can & (taken[:, None] != alternatives), with_all - before + alone[:, None], 0)
        into_place = with_all[:, taken] - before  # [G, G]
        fits = can[:, taken]
        exchanged = np.where(fits & fits.T, into_place + into_place.T + apart, 0)
        if min(moved.min(), exchanged.min()) >= 0:
            return taken
        if moved.min() <= exchanged.min():
            group, alternative = np.unravel_index(np.argmin(moved), moved.shape)
            taken[group] = alternative
        else:
            one, other = np.unravel_index(np.argmin(exchanged), exchanged.shape)
            taken[[one, other]] = taken[[other, one]]
