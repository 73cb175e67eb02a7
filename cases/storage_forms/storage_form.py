"""Describe a storage form: one way in which operands lie in memory (docs/contract.md, section 8).

The problem itself stays dense, `[B, T, ...]` and `[B, S, ...]`. A form says how a case id writes it, which operands and
tables a call gets, and how dense operands become those. Each form is a module `NAME_form` with one `StorageForm`. Which
cases a kernel of that form is judged on is in a module `NAME_cases` (`cases.storage_forms.form_cases`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from cases.operand_registry import REMOVABLE
from cases.storage_forms.mask_sides import Sides
from cases.storage_forms.storage_layout import Storage

MAX_SIZE = 4096
"""The largest number of tokens that a page or a ring has."""
STORED_OPERANDS = tuple(operand.name for operand in REMOVABLE if operand.stored)
"""Optional operands that calls of packed queries may have, beside their tables."""


@dataclasses.dataclass(frozen=True)
class StorageSpec:
    """The storage that a case id names.

    Attributes:
      form: the name of the form.
      size: tokens in a page, or slots of a ring; none for a form without either.
      shared: whether sequences begin alike, and share the pages of that.
      q_lengths: the number of queries of each sequence; empty if all have `T`.
    """

    form: str
    size: int | None
    shared: bool
    q_lengths: tuple[int, ...]

    def get_q_lengths(self, batch: int, q_length: int) -> tuple[int, ...]:
        """Return the number of queries of each of `batch` sequences."""
        return self.q_lengths or (q_length,) * batch


class StoredCase(Protocol):
    """The part of `cases.case.Case` that decides where operands lie."""

    @property
    def batch(self) -> int:
        """The number of sequences."""
        ...

    @property
    def q_length(self) -> int:
        """The number T of queries of the dense problem."""
        ...

    @property
    def kv_length(self) -> int:
        """The number S of keys of the dense problem."""
        ...

    @property
    def kv_lengths(self) -> tuple[int, ...]:
        """The number of keys of each sequence."""
        ...

    @property
    def seed(self) -> int:
        """The seed of all values."""
        ...


@dataclasses.dataclass(frozen=True)
class ScaleParameters:
    """A pair of parameters by which a plain function takes the scales of a quantised cache.

    Attributes:
      names: of the scales of keys and of values.
      descriptions: of each, in messages.
      features: what a function with both parameters offers.
      as_numbers: whether the scales are Python numbers, one for all keys and one for all values.
    """

    names: tuple[str, str]
    descriptions: tuple[str, str]
    features: frozenset[str]
    as_numbers: bool


def accept_all_sizes(text: str, num_kv_heads: int, head_dim: int, v_head_dim: int, extra: str | None) -> None:
    """Accept the sizes of any case."""


def accept_all_masks(case: StoredCase, spec: StorageSpec, sides: Sides) -> str | None:
    """Accept any mask that has sides."""
    return None


def allow_any_left(storage: Storage) -> int | None:
    """Return None: the storage holds all keys, so that a window may be open to the left."""
    return None


def keep_layout(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the gathered keys and values as they are."""
    return dict(arrays)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StorageForm:
    """One way in which operands are stored.

    Attributes:
      name: names the form in `Implementation.storage`, and the feature that cases of this form need.
      description: one line for lists of features.
      prefixes: how a case id begins, by whether sequences share pages.
      unit: what has the size in a case id ("pages"); empty if the id has no size.
      has_q_lengths: whether each sequence may have its own number of queries; else all have `T`.
      is_cache: whether keys and values are a cache: read only, without gradients, and always under a causal mask.
      is_tied: whether the values are the first coordinates of the keys, so that there is no array of values.
      maps_over_batch: whether the call can be mapped (`jax.vmap`) over its operands.
      check_sizes: raises `ValueError` for K, H, V or another operand that the form cannot have.
      find_mask_refusal: why no call of this form has the mask of a case, or None.
      find_widest_left: the left side of the widest window that a layout has all keys for; None if it has all keys.
      draw_layout: draws where everything lies; none if operands stay dense.
      describe_layout: describes a drawn layout in a phrase.
      operands: the positional arguments of a plain function.
      tables: the arrays of a layout that the call gets by keyword.
      parameters: every keyword that a plain function may have.
      required: the keywords without which it is no function of this form, each with a description.
      marks: keywords by which a plain function is recognised as one of this form.
      noun: what a function of this form takes, in messages.
      scales: how it takes the scales of a quantised cache; empty if it takes none.
      example: a case id's storage for a case of one sequence with T = S = 128 or with one query.
      arrange: turns gathered keys and values, `[*held.shape, K, depth]`, into the arguments of the call.
      level: names the form among the causes that a report finds.
      condition: completes "where ..." in sentences of a report.
    """

    name: str
    description: str
    prefixes: Mapping[bool, str]
    unit: str = ""
    has_q_lengths: bool = True
    is_cache: bool
    is_tied: bool = False
    maps_over_batch: bool = True
    check_sizes: Callable[[str, int, int, int, str | None], None] = accept_all_sizes
    find_mask_refusal: Callable[[StoredCase, StorageSpec, Sides], str | None] = accept_all_masks
    find_widest_left: Callable[[Storage], int | None] = allow_any_left
    draw_layout: Callable[[StoredCase, StorageSpec], Storage] | None
    describe_layout: Callable[[Storage], str] | None = None
    operands: tuple[str, ...] = ("q", "k", "v")
    tables: tuple[str, ...] = ()
    parameters: tuple[str, ...]
    required: Mapping[str, str]
    marks: tuple[str, ...] = ()
    noun: str
    scales: tuple[ScaleParameters, ...] = ()
    example: str
    arrange: Callable[[Mapping[str, Any]], dict[str, Any]] = keep_layout
    level: str
    condition: str

    @property
    def is_dense(self) -> bool:
        """Whether queries and keys stay where the dense problem has them, so that masks and operands do too."""
        return self.draw_layout is None

    @property
    def syntax(self) -> str:
        """Return how a case id writes the form, in messages; `P` stands for its size."""
        return "|".join(prefix + ("P" if self.unit else "") for prefix in self.prefixes.values())

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """The part of a case id that names the form: prefix, size and numbers of queries."""
        prefixes = "|".join(self.prefixes.values())
        return re.compile(rf"({prefixes}){'([1-9][0-9]*)' if self.unit else '()'}(?:-q([0-9]+(?:-[0-9]+)*))?")

    def format(self, size: int | None, q_lengths: tuple[int, ...], *, shared: bool = False) -> str:
        """Return the part of a case id for sequences with these numbers of queries."""
        first = self.prefixes[shared] + ("" if size is None else str(size))
        if len(set(q_lengths)) == 1 or not self.has_q_lengths:
            return first
        return "-".join((f"{first}-q{q_lengths[0]}", *map(str, q_lengths[1:])))
