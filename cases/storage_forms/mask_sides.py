"""Read masks of stored sequences: their sides, or else their formula of positions in the sequence.

The sides say how far a query sees to the left and right of its own position. Stored calls get them as `causal` or
`window`. `stored_cases` lowers masks to them, and other masks to a formula or to booleans.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from cases.masks import (
    And,
    Causal,
    Chunked,
    Dense,
    Full,
    Lengths,
    Mask,
    Or,
    OwnWindow,
    Pair,
    Placed,
    Tree,
    VaryingWindow,
    Window,
    iter_leaves,
    list_conjuncts,
    split_lists,
)


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


def remove_lists(mask: Mask) -> Mask:
    """Return the part of `mask` beside its lists of keys and a local window; the mask itself if it has no lists."""
    parts = split_lists(mask)
    return mask if parts is None else parts.rest


def find_local_sides(mask: Mask, q_length: int, kv_length: int) -> Sides | None:
    """Return the sides of the window beside the lists of `mask`; None if it has none, or one without sides."""
    parts = split_lists(mask)
    if parts is None or parts.local is None:
        return None
    lengths = (part for part in list_conjuncts(parts.rest) if isinstance(part, Lengths))
    sides = find_sides(next(lengths, Full()) & parts.local, q_length, kv_length)
    return None if sides is None or sides.first else sides


def find_lists(mask: Mask, kv_lengths: tuple[int, ...]) -> np.ndarray | None:
    """Find the lists of keys of `mask`, int32 `[B, T, k]`, or None if it has none.

    Entries beyond the keys of their sequence, of which there are `kv_lengths`, become -1: memory holds no such key.
    """
    parts = split_lists(mask)
    if parts is None:
        return None
    lists = parts.lists
    return np.where(lists.indices < np.array(kv_lengths, np.int32)[:, None, None], lists.indices, np.int32(-1))


def find_sides(mask: Mask, q_length: int, kv_length: int) -> Sides | None:
    """Return the sides of `mask`, or None if it has none.

    In each sequence, the last query stands at the last key. A causal mask or window that counts positions along the
    axes `T` and `S` therefore has sides only if all sequences have the same length. Lists of keys have no sides.
    """
    parts = list_conjuncts(remove_lists(mask))
    lengths = next((part.lengths for part in parts if isinstance(part, Lengths)), None)
    found = Sides()
    for part in parts:
        if isinstance(part, Full | Lengths):
            continue
        if isinstance(part, OwnWindow | Placed):
            if not _stands_at_end(part, lengths, q_length, kv_length):
                return None
            window = _read_window(part)
        elif lengths is None and isinstance(part, Causal | Window) and part.offset == kv_length - q_length:
            window = Sides(None, 0) if isinstance(part, Causal) else Sides(part.left, part.right)
        else:
            return None
        if window is None or (both := _intersect(found, window)) is None:
            return None
        found = both
    return found


def _intersect(one: Sides, other: Sides) -> Sides | None:
    """Return the sides of keys that are within both; None if a query sees first tokens by one window alone."""
    if one.left is not None and other.left is not None and one.first != other.first:
        return None
    return Sides(_find_least(one.left, other.left), _find_least(one.right, other.right), max(one.first, other.first))


def _find_least(one: int | None, other: int | None) -> int | None:
    return min((n for n in (one, other) if n is not None), default=None)


def _stands_at_end(
    mask: OwnWindow | Placed | VaryingWindow, lengths: tuple[int, ...] | None, q_length: int, kv_length: int
) -> bool:
    """Return whether the last query of each sequence stands at its last key."""
    ends = (kv_length,) * len(mask.positions) if lengths is None else lengths
    return tuple(n - q_length for n in ends) == mask.positions


def _read_window(mask: OwnWindow | Placed) -> Sides | None:
    if isinstance(mask, OwnWindow):
        return Sides(mask.left, 0, mask.first)
    inner = mask.mask
    return Sides(inner.left, inner.right) if isinstance(inner, Window) and inner.offset == 0 else None


def is_placed(mask: Mask, q_length: int, kv_length: int) -> bool:
    """Return whether `mask` is arrays, lengths, and formulas that put each sequence's last query at its last key.

    Lists of keys may stand beside these, with or without a local window.
    """
    mask = remove_lists(mask)
    lengths = next((part.lengths for part in list_conjuncts(mask) if isinstance(part, Lengths)), None)
    return all(
        _stands_at_end(leaf, lengths, q_length, kv_length)
        if isinstance(leaf, OwnWindow | Placed | VaryingWindow)
        else isinstance(leaf, Full | Lengths) or type(leaf) in (Dense, Tree)
        for leaf in iter_leaves(mask)
    )


def read_formula(mask: Mask) -> Mask | None:
    """Return `mask` as a formula of a query's position in its sequence, without lengths.

    None if it has an array, or first tokens besides a window.
    """
    if isinstance(mask, Pair):
        left, right = read_formula(mask.left), read_formula(mask.right)
        if left is None or right is None:
            return None
        if isinstance(mask, And) and isinstance(left, Full):
            return right
        return left if isinstance(mask, And) and isinstance(right, Full) else type(mask)(left, right)
    if isinstance(mask, OwnWindow) and not mask.first:
        return Causal() if mask.left is None else Window(mask.left, 0)
    if isinstance(mask, Placed):
        return mask.mask
    if isinstance(mask, VaryingWindow):
        return dataclasses.replace(mask, positions=())
    return Full() if isinstance(mask, Full | Lengths) else None


def sees_no_later_key(mask: Mask) -> bool:
    """Return whether it follows from the kinds in `mask` that no query sees a key after its own position."""
    if isinstance(mask, And):
        return sees_no_later_key(mask.left) or sees_no_later_key(mask.right)
    if isinstance(mask, Or):
        return sees_no_later_key(mask.left) and sees_no_later_key(mask.right)
    if isinstance(mask, Placed):
        return sees_no_later_key(mask.mask)
    is_window = isinstance(mask, Causal | Window | Chunked) and mask.offset == 0 and getattr(mask, "right", 0) == 0
    return is_window or isinstance(mask, OwnWindow | Tree | VaryingWindow)
