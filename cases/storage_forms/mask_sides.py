"""Reduce a mask of stored sequences to its sides: how far a query sees to the left and right of its own position.

Stored calls take only such masks, as `causal` or `window`. `stored_cases` lowers masks to them.
"""

from __future__ import annotations

import dataclasses

from cases.masks import Causal, Full, Lengths, Mask, OwnWindow, Window, list_conjuncts


@dataclasses.dataclass(frozen=True)
class Sides:
    """The number of keys that a query sees to the left and to the right of its own position; None if it sees all.

    `first` is the number of keys at the beginning of the sequence that it sees too, however far they lie to the left.
    """

    left: int | None = None
    right: int | None = None
    first: int = 0

    @property
    def is_causal(self) -> bool:
        """Whether no query sees a later key."""
        return self.right == 0


def find_kv_lengths(mask: Mask, batch: int, kv_length: int) -> tuple[int, ...]:
    """Return the number of keys of each sequence: the mask's lengths if it has any, otherwise `kv_length` for all."""
    found = [part.lengths for part in list_conjuncts(mask) if isinstance(part, Lengths)]
    return found[0] if found else (kv_length,) * batch


def find_first_tokens(mask: Mask) -> int:
    """Return how many first tokens of each sequence a mask of stored sequences shows besides its window."""
    return max((part.first for part in list_conjuncts(mask) if isinstance(part, OwnWindow)), default=0)


def find_sides(mask: Mask, q_length: int, kv_length: int) -> Sides | None:
    """Return the sides of `mask`, or None if it has none.

    In each sequence, the last query stands at the last key. A causal mask or window that counts positions along the
    axes `T` and `S` therefore has sides only if all sequences have the same length.
    """
    parts = list_conjuncts(mask)
    lengths = next((part.lengths for part in parts if isinstance(part, Lengths)), None)
    found = Sides()
    for part in parts:
        if isinstance(part, Full | Lengths):
            continue
        if isinstance(part, OwnWindow):
            ends = (kv_length,) * len(part.positions) if lengths is None else lengths
            if tuple(n - q_length for n in ends) != part.positions:
                return None
            if found.left is not None and part.first != found.first:
                return None
            found = dataclasses.replace(_intersect(found, Sides(part.left, 0)), first=part.first)
        elif lengths is None and isinstance(part, Causal | Window) and part.offset == kv_length - q_length:
            other = Sides(None, 0) if isinstance(part, Causal) else Sides(part.left, part.right)
            if found.first and other.left is not None:
                return None
            found = dataclasses.replace(_intersect(found, other), first=found.first)
        else:
            return None
    return found


def _intersect(one: Sides, other: Sides) -> Sides:
    return Sides(_find_least(one.left, other.left), _find_least(one.right, other.right))


def _find_least(one: int | None, other: int | None) -> int | None:
    return min((n for n in (one, other) if n is not None), default=None)
