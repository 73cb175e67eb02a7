"""Reduce a mask of stored sequences to its sides: how far a query sees to the left and right of its own position.

Stored calls take only such masks, as `causal` or `window`. `stored_cases` lowers masks to them.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from cases.masks import Causal, Full, Lengths, Listed, Mask, OwnWindow, Window, list_conjuncts


@dataclasses.dataclass(frozen=True)
class Sides:
    """The number of keys that a query sees to the left and to the right of its own position; None if it sees all."""

    left: int | None = None
    right: int | None = None

    @property
    def is_causal(self) -> bool:
        """Whether no query sees a later key."""
        return self.right == 0


def find_kv_lengths(mask: Mask, batch: int, kv_length: int) -> tuple[int, ...]:
    """Return the number of keys of each sequence: the mask's lengths if it has any, otherwise `kv_length` for all."""
    found = [part.lengths for part in list_conjuncts(mask) if isinstance(part, Lengths)]
    return found[0] if found else (kv_length,) * batch


def find_lists(mask: Mask, kv_lengths: tuple[int, ...]) -> np.ndarray | None:
    """Find the lists of keys of `mask`, int32 `[B, T, k]`, or None if it has none.

    Entries beyond the keys of their sequence, of which there are `kv_lengths`, become -1: memory holds no such key.
    """
    lists = next((part.indices for part in list_conjuncts(mask) if isinstance(part, Listed)), None)
    if lists is None:
        return None
    return np.where(lists < np.array(kv_lengths, np.int32)[:, None, None], lists, np.int32(-1))


def find_sides(mask: Mask, q_length: int, kv_length: int) -> Sides | None:
    """Return the sides of `mask`, or None if it has none.

    In each sequence, the last query stands at the last key. A causal mask or window that counts positions along the
    axes `T` and `S` therefore has sides only if all sequences have the same length. Lists of keys have no sides.
    """
    parts = list_conjuncts(mask)
    lengths = next((part.lengths for part in parts if isinstance(part, Lengths)), None)
    found = Sides()
    for part in parts:
        if isinstance(part, Full | Lengths | Listed):
            continue
        if isinstance(part, OwnWindow):
            ends = (kv_length,) * len(part.positions) if lengths is None else lengths
            if tuple(n - q_length for n in ends) != part.positions:
                return None
            found = _intersect(found, Sides(part.left, 0))
        elif lengths is None and isinstance(part, Causal | Window) and part.offset == kv_length - q_length:
            found = _intersect(found, Sides(None, 0) if isinstance(part, Causal) else Sides(part.left, part.right))
        else:
            return None
    return found


def _intersect(one: Sides, other: Sides) -> Sides:
    return Sides(_find_least(one.left, other.left), _find_least(one.right, other.right))


def _find_least(one: int | None, other: int | None) -> int | None:
    return min((n for n in (one, other) if n is not None), default=None)
