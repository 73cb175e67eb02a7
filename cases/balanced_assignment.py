"""Assign one of a few alternatives to each case, as evenly as possible on every level of every axis.

An alternative is, for example, which of several costly tests a check runs on a case. Each alternative goes to as many
cases as any other, in total and among the cases at each level of each axis (mask, dtype, ...). So all pairs of an
alternative and a level should occur equally often. To this end the sum of the squares of these counts is made small, as
in the minimisation of clinical trials (Pocock and Simon, "Sequential treatment assignment with balancing for
prognostic factors in the controlled clinical trial", Biometrics 31(1), 1975). Unlike patients, cases do not arrive one
at a time, so alternatives may be exchanged afterwards. Nothing is random: ties go to what comes first.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence

import numpy as np

# In the grids of three implementations, eight starts instead of one reduce the sum of squares by 10 to 264 for the
# choice that cases share. 64 starts reduce it by another 4 to 8, at eight times the cost.
_STARTS = 8


def assign(
    levels: Sequence[tuple[Hashable, ...]],
    allowed: Sequence[tuple[int, ...]],
    *,
    count: int,
    together: Sequence[Hashable] | None = None,
    first: int = 0,
) -> tuple[int | None, ...]:
    """Assign an alternative of `0..count - 1` to each case.

    Args:
      levels: for each case, its level on each axis.
      allowed: for each case, the alternatives that it can take; empty if the choice has no meaning for it.
      together: a label for each case. Cases with the same label take the same alternative, which all of them must be
        able to take. By default each case has its own label.
      first: the alternative that is preferred where several are equally good. Another one gives another assignment that
        is equally even.

    Returns:
      An alternative for each case; None for cases that can take none.

    Raises:
      ValueError: if cases with the same label have no alternative in common.
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
    """Assign as `assign` does. Results are cached: implementations with the same features have the same cases."""
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
            raise ValueError(f"cases with one label have no alternative in common: {[allowed[c] for c in members]}")
        can[group, [(alternative - first) % count for alternative in common]] = True
    taken = _find_most_even(_compute_products(levels, list(groups.values())), can)
    found: list[int | None] = [None] * len(levels)
    for members, alternative in zip(groups.values(), taken, strict=True):
        for case in members:
            found[case] = int(alternative + first) % count
    return tuple(found)


def _compute_products(levels: Sequence[tuple[Hashable, ...]], groups: Sequence[Sequence[int]]) -> np.ndarray:
    """Compute what each pair of groups adds to the sum of squares by taking the same alternative, `[G, G]`.

    A group is a set of cases that take the same alternative. The main part is the number of cases of one group at a
    level times that of the other group, summed over all levels of all axes. One more is added for each axis, so that
    groups are spread evenly, since each group is expensive. The product of the two sizes has a weight larger than
    everything else together, so that cases are spread evenly first.
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
    """Return the alternative of each group `[G]`, the best result from several starts."""
    orders = (np.roll(np.arange(len(can)), -start * len(can) // _STARTS) for start in range(_STARTS))
    found = [_improve_assignment(products, can, _assign_greedily(products, can, order)) for order in orders]
    return min(found, key=lambda taken: int(products[taken[:, None] == taken].sum()))


def _assign_greedily(products: np.ndarray, can: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Assign each group the alternative that keeps the counts most even; groups with fewest alternatives come first."""
    taken = np.full(len(can), -1)
    for group in sorted(order, key=lambda group: int(can[group].sum())):
        possible = np.flatnonzero(can[group])
        taken[group] = min(possible, key=lambda alternative: int(products[group, taken == alternative].sum()))
    return taken


def _improve_assignment(products: np.ndarray, can: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """Change one group's alternative, or exchange those of two groups, while that helps; take the best change first."""
    alternatives = np.arange(can.shape[1])
    alone = np.diagonal(products)
    apart = alone[:, None] + alone - 2 * products
    taken = taken.copy()
    while True:
        # Half of what each change adds to the sum of squares; a negative number is an improvement.
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
