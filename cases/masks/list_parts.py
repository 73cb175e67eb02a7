"""Split masks with lists of keys: `rest & lists`, or `rest & (lists | local)` with a local window beside the lists."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from cases.masks.mask_base import Mask, Or, Pair, list_conjuncts
from cases.masks.mask_formulas import Causal, Full, Window
from cases.masks.row_masks import Listed, OwnWindow, Placed

__all__ = ["LOCAL_WINDOW", "ListParts", "replace_lists", "split_lists"]

LOCAL_WINDOW = "local_window"
"""The feature of a window of keys that a query sees beside those of its list."""


class ListParts(NamedTuple):
    """The parts of a mask with lists of keys."""

    rest: Mask  # what listed keys and those of the local window must satisfy too
    lists: Listed
    # The window of keys that a query sees beside its list: `Window`, `OwnWindow` or a `Placed` window. None: no window.
    local: Mask | None


def split_lists(mask: Mask) -> ListParts | None:
    """Split a mask into its parts; None if it has no lists of keys, or is of neither form.

    `(a & lists) | (a & local)` is of the second form too. So is `(causal & lists) | local` with a window that sees no
    later key.
    """
    parts = list_conjuncts(mask)
    for n, part in enumerate(parts):
        others = (*parts[:n], *parts[n + 1 :])
        if isinstance(part, Listed):
            return ListParts(_join(others), part, None)
        if isinstance(part, Or):
            for one, other in ((part.left, part.right), (part.right, part.left)):
                if (found := _split_union(list_conjuncts(one), list_conjuncts(other))) is not None:
                    return found._replace(rest=_join((*others, *list_conjuncts(found.rest))))
    return None


def _split_union(one: Sequence[Mask], other: Sequence[Mask]) -> ListParts | None:
    """Split the union of two conjunctions, of which `one` has the lists, and `other` the window."""
    lists = next((part for part in one if isinstance(part, Listed)), None)
    if lists is None:
        return None
    shared = [part for part in one if part is not lists and not isinstance(part, Full)]
    for local in other:
        beside = [part for part in other if part is not local and not isinstance(part, Full)]
        if not _is_window(local) or any(part.at_run_time for part in (*shared, *beside)):
            continue
        if all(part in beside or _contains(part, local) for part in shared) and all(part in shared for part in beside):
            return ListParts(_join(shared), lists, local)
    return None


def _is_window(mask: Mask) -> bool:
    return isinstance(mask, Window | OwnWindow) or (isinstance(mask, Placed) and isinstance(mask.mask, Window))


def _contains(mask: Mask, window: Mask) -> bool:
    """Return whether `mask` is a causal mask that allows all pairs that `window` allows."""
    if isinstance(window, Window):
        return mask == Causal(window.offset) and window.right is not None and window.right <= 0
    return isinstance(window, OwnWindow) and mask == OwnWindow(None, window.positions)


def _join(parts: Iterable[Mask]) -> Mask:
    others = [part for part in parts if not isinstance(part, Full)]
    return functools.reduce(operator.and_, others) if others else Full()


def replace_lists(mask: Mask, change: Callable[[Listed], Listed]) -> Mask:
    """Return the mask with `change` applied to each of its lists of keys."""
    if isinstance(mask, Pair):
        return type(mask)(replace_lists(mask.left, change), replace_lists(mask.right, change))
    return change(mask) if isinstance(mask, Listed) else mask
