"""Taking turns: each case is given one of a few alternatives, and each alternative falls to as many cases as any other.

That holds of all cases together and, as far as it goes, of the cases of each level of each axis, so that every pair of
an alternative and a level occurs as often as the others do. What is made small is the sum of squares of these counts,
as in the minimisation of clinical trials (Pocock and Simon, "Sequential treatment assignment with balancing for
prognostic factors in the controlled clinical trial", Biometrics 31(1), 1975). Here nobody waits to be treated, so what
was given may be exchanged afterwards. There is no chance in it: ties go to what comes first.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence

import numpy as np


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
    taken = _improved(_products(levels, list(groups.values())), can)
    found: list[int | None] = [None] * len(levels)
    for members, alternative in zip(groups.values(), taken, strict=True):
        for case in members:
            found[case] = int(alternative + first) % count
    return tuple(found)


def _products(levels: Sequence[tuple[Hashable, ...]], groups: Sequence[Sequence[int]]) -> np.ndarray:
    """What two groups add to the sum of squares if they take the same alternative, half of it `[G, G]`.

    For each level of an axis, the number of cases that the one has there times that of the other. All cases together
    are one level more, which counts for more than all others can: it is even first, and the rest as far as that leaves.
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
    sizes = np.array([len(members) for members in groups], np.int64)
    above = 1 + 2 * len(levels[groups[0][0]]) * int(sizes.sum()) ** 2
    found: np.ndarray = present @ present.T + above * np.outer(sizes, sizes)
    return found


def _improved(products: np.ndarray, can: np.ndarray) -> np.ndarray:
    """The alternative of each group, `[G]`: given one after the other, then changed and exchanged while that helps."""
    taken = _in_order(products, can)
    alone = np.diagonal(products)
    everyone = np.arange(len(can))
    # Half of what an exchange of two adds by the two themselves; they must be able to take each other's place.
    apart = alone[:, None] + alone[None, :] - 2 * products
    while True:
        shared = products @ (taken[:, None] == np.arange(can.shape[1]))  # [G, A]: with all that take an alternative
        leaving = shared[everyone, taken]
        moved = shared - leaving[:, None] + alone[:, None]
        moved[~can | (taken[:, None] == np.arange(can.shape[1]))] = 0
        gained = shared[:, taken] - leaving[:, None]  # [G, G]: row taking the place of column, were it free
        exchanged = gained + gained.T + apart
        fits = can[:, taken]
        exchanged[~(fits & fits.T)] = 0
        if min(moved.min(), exchanged.min()) >= 0:
            return taken
        if moved.min() <= exchanged.min():
            group, alternative = np.unravel_index(np.argmin(moved), moved.shape)
            taken[group] = alternative
        else:
            one, other = np.unravel_index(np.argmin(exchanged), exchanged.shape)
            taken[[one, other]] = taken[[other, one]]


def _in_order(products: np.ndarray, can: np.ndarray) -> np.ndarray:
    """Those with the fewest alternatives first, each group takes the one that leaves the counts most even."""
    taken = np.full(len(can), -1)
    for group in np.argsort(can.sum(axis=1), kind="stable"):
        cost = [products[group, taken == a].sum() if can[group, a] else np.inf for a in range(can.shape[1])]
        taken[group] = int(np.argmin(cost))
    return taken
