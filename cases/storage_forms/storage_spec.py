"""How a case id writes the storage of its operands, and what a kernel of each kind can be asked for.

    packed            paged16            shared16            paged16-q5-1-16
    latent            latent16           latentshared16      latent16-q5-1-16

`packed` has queries, keys and values of all sequences behind each other. `paged16` has packed queries, and keys and
values in pages of 16 tokens. In `shared16` sequences also begin alike, and share the pages of that. The numbers behind
`-q` are how many of the `T` queries each sequence has, its last ones; without them every sequence has all.

`latent` has one key for all query heads, whose first `V` coordinates are the value (multi-head latent attention in its
absorbed form, arXiv:2405.04434); with a number behind it, such latents lie in pages.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from cases.masks import Causal, Full, Lengths, Mask, OwnWindow, Window, list_conjuncts

Kind = Literal["packed", "paged", "latent", "latent_pages"]
KINDS: tuple[Kind, ...] = ("packed", "paged", "latent", "latent_pages")
IN_PAGES: tuple[Kind, ...] = ("paged", "latent_pages")
LATENT: tuple[Kind, ...] = ("latent", "latent_pages")
"""Kinds whose values are the first coordinates of the keys: there is no array of values."""
FEATURES: dict[str, str] = {
    "packed": "sequences packed behind each other, with cumulative lengths",
    "paged": "packed queries, and keys and values in pages that a table names",
    "latent": "one latent for all query heads, whose first coordinates are the values",
    "latent_pages": "packed queries, and such latents in pages that a table names",
}
"""Features by kind of storage."""
SYNTAX = "packed|pagedP|sharedP|latent|latentP|latentsharedP[-qL-...]"
"""How a case id writes it, in messages."""
MAX_PAGE = 4096

_SPEC = re.compile(r"(packed|latent|(?:paged|shared|latent|latentshared)([1-9]\d*))(?:-q(\d+(?:-\d+)*))?")
# How an id begins, by kind and by whether sequences begin alike.
_PAGES = {
    ("paged", False): "paged",
    ("paged", True): "shared",
    ("latent_pages", False): "latent",
    ("latent_pages", True): "latentshared",
}


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a case id says of the storage.

    Attributes:
      kind: one of `KINDS`.
      page_size: how many tokens a page has, none without pages.
      shared: whether sequences begin alike, and share pages.
      q_lengths: how many queries each sequence has; empty if all have `T`.
    """

    kind: Kind
    page_size: int | None
    shared: bool
    q_lengths: tuple[int, ...]

    def lengths(self, batch: int, q_length: int) -> tuple[int, ...]:
        """How many queries each of `batch` sequences has."""
        return self.q_lengths or (q_length,) * batch


def is_storage(part: str) -> bool:
    """Whether a part of a case id is about storage."""
    return _SPEC.fullmatch(part) is not None


def parse_storage(text: str, batch: int, q_length: int) -> Spec:
    """The storage that `text` names, of `batch` sequences of which the longest has `q_length` queries.

    Raises:
      ValueError: if it names none, or does not fit these sizes.
    """
    found = _SPEC.fullmatch(text)
    if not found:
        raise ValueError(f"storage {text!r} is not of the form {SYNTAX}")
    lengths = tuple(int(n) for n in found[3].split("-")) if found[3] else ()
    if lengths and (len(lengths) != batch or max(lengths) > q_length or not any(lengths)):
        raise ValueError(
            f"storage {text!r} needs a number of queries for each of {batch} sequences: at most {q_length}, not all 0"
        )
    if lengths and min(lengths) == q_length:
        raise ValueError(f"storage {text!r} has T={q_length} queries for every sequence: leave them out")
    size = int(found[2]) if found[2] else None
    if size is not None and size > MAX_PAGE:
        raise ValueError(f"storage {text!r} has pages of more than {MAX_PAGE} tokens")
    latent = found[1].startswith("latent")
    if latent and size is None and lengths:
        raise ValueError(f"storage {text!r} has all T={q_length} queries in every row: only packed ones have lengths")
    kind: Kind = ("latent" if latent else "packed") if size is None else "latent_pages" if latent else "paged"
    return Spec(kind, size, "shared" in found[1], lengths)


def check_latent(text: str, num_kv_heads: int, head_dim: int, v_head_dim: int, *, more: str | None) -> None:
    """Refuse sizes that no latent has; `more` is what the case has beside it that has no form with a latent, if any.

    Raises:
      ValueError: saying what must be.
    """
    if num_kv_heads != 1:
        raise ValueError(f"storage {text!r} is one latent for all query heads, so K must be 1, got {num_kv_heads}")
    if v_head_dim > head_dim:
        raise ValueError(
            f"storage {text!r} has its values in the first of {head_dim} coordinates, so V must be at most that, "
            f"got {v_head_dim}"
        )
    if more is not None:
        raise ValueError(f"storage {text!r} and {more!r} have no form together")


def format_storage(kind: Kind, page_size: int | None, q_lengths: tuple[int, ...], *, shared: bool = False) -> str:
    """The part of a case id for these; `parse` reads it."""
    first = kind if page_size is None else f"{_PAGES[kind, shared]}{page_size}"
    return first if len(set(q_lengths)) == 1 else "-".join((f"{first}-q{q_lengths[0]}", *map(str, q_lengths[1:])))


def find_kv_lengths(mask: Mask, batch: int, kv_length: int) -> tuple[int, ...]:
    """How many keys each sequence has: those of the mask's lengths, or all."""
    found = [part.lengths for part in list_conjuncts(mask) if isinstance(part, Lengths)]
    return found[0] if found else (kv_length,) * batch


@dataclasses.dataclass(frozen=True)
class Sides:
    """How far a query sees in its own sequence: keys to the left and to the right of its place, None for all."""

    left: int | None = None
    right: int | None = None

    @property
    def is_causal(self) -> bool:
        """Whether no query sees a later key."""
        return self.right == 0


def find_sides(mask: Mask, q_length: int, kv_length: int) -> Sides | None:
    """What `mask` means where each sequence has its own end, where all its queries stand last; None if something else.

    `q_length` and `kv_length` are those of the dense problem. A mask that goes by places on its axes means the same for
    all sequences only if all have the same length.
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
