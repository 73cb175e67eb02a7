"""Define `StorageForm`, the description of one way in which operands lie in memory (docs/contract.md, section 8).

The problem of a case stays dense, `[B, T, ...]` and `[B, S, ...]`. A form says how a case id writes it, which operands
and tables a call gets, and how dense operands become stored ones. Each form is a module `NAME_form` that defines one
`StorageForm`. A module `NAME_cases` defines the cases on which kernels of the form are judged
(`cases.storage_forms.form_cases`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from cases.operand_registry import REMOVABLE
from cases.storage_forms.mask_sides import Sides
from cases.storage_forms.storage_layout import Storage

MAX_SIZE = 4096
"""The largest number of tokens that a page or a ring may have."""
FIRST_PARAMETER = "num_sink_tokens"
"""The keyword parameter that says how many first tokens of each sequence a cache keeps."""
STORED_OPERANDS = tuple(operand.name for operand in REMOVABLE if operand.stored)
"""The names of the optional operands that a call with packed, paged or ring operands may have."""
MASK_ARRAYS = ("mask", "tree_mask", "parents")
"""The parameters for masks over sequences that are arrays, for forms with `takes_masks`."""
MASK_PARAMETERS = ("mask_mod", *MASK_ARRAYS)
"""The parameters for masks over sequences that are neither causal nor windows, for forms with `takes_masks`."""


@dataclasses.dataclass(frozen=True)
class StorageSpec:
    """The storage of a case, parsed from its id."""

    form: str
    size: int | None  # the number of tokens in a page, or of slots in a ring; None for a form without pages or rings
    shared: bool  # whether sequences have a common prefix, and share the pages of that prefix
    q_lengths: tuple[int, ...]

    def get_q_lengths(self, batch: int, q_length: int) -> tuple[int, ...]:
        """Return the number of queries of each of `batch` sequences."""
        return self.q_lengths or (q_length,) * batch


class StoredCase(Protocol):
    """The fields of `cases.case.Case` that decide where operands lie in memory."""

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
    def first_tokens(self) -> int:
        """The number of first tokens of each sequence that all its queries see, besides a window."""
        ...

    @property
    def seed(self) -> int:
        """The seed of everything that is drawn at random for the case."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleParameters:
    """The parameters by which a user's function takes the scales of a quantised cache."""

    names: tuple[str, ...]  # the names of the parameters, for the scales of keys and of values
    descriptions: tuple[str, ...]  # what each parameter holds, for messages
    features: frozenset[str]  # the features that a function with all of the parameters offers
    written_features: frozenset[str] = frozenset()  # the same for a function that writes the cache; empty if none may
    caches: tuple[str, ...]  # the caches whose scales the parameters take (`cases.quantization`)


def accept_all_sizes(text: str, num_kv_heads: int, head_dim: int, v_head_dim: int, extra: str | None) -> None:
    """Accept the sizes of any case: the default of `StorageForm.check_sizes`."""


def accept_all_lengths(text: str, q_lengths: Sequence[int], kv_lengths: Sequence[int]) -> None:
    """Accept any numbers of queries and keys: the default of `StorageForm.check_lengths`."""


def accept_all_masks(case: StoredCase, spec: StorageSpec, sides: Sides) -> str | None:
    """Return None, so that any mask is accepted: the default of `StorageForm.find_mask_refusal`."""
    return None


def allow_any_left(storage: Storage, first: int) -> int | None:
    """Return None, since the storage holds all keys: the default of `StorageForm.find_widest_left`."""
    return None


def keep_layout(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the gathered keys and values unchanged: the default of `StorageForm.arrange`."""
    return dict(arrays)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StorageForm:
    """One way in which operands are stored."""

    name: str  # the name of the form in `Implementation.storage`, and of the feature that cases of this form need
    description: str  # one line that describes the form in lists of features
    # The prefix of the storage in a case id, without shared pages (False) and with them (True).
    prefixes: Mapping[bool, str]
    # The plural noun for what the size in a case id measures, such as "pages"; empty if the id has no size.
    unit: str = ""
    has_q_lengths: bool = True  # whether each sequence may have its own number of queries; otherwise all have `T`
    is_cache: bool  # whether keys and values are a cache: read only, without gradients, and always under a causal mask
    # Whether the values are the first coordinates of the keys, so that there is no array of values.
    is_tied: bool = False
    takes_masks: bool = False  # whether a call may have masks beside causal ones and windows (`MASK_PARAMETERS`)
    # The names of the optional operands that a call may have beside `STORED_OPERANDS`.
    further_operands: tuple[str, ...] = ()
    maps_over_batch: bool = True  # whether `jax.vmap` can map the call over its operands
    # Raises `ValueError` for K, H, V or another operand that the form cannot have.
    check_sizes: Callable[[str, int, int, int, str | None], None] = accept_all_sizes
    # Raises `ValueError` for numbers of queries and keys of a sequence that the form cannot have.
    check_lengths: Callable[[str, Sequence[int], Sequence[int]], None] = accept_all_lengths
    # Returns why no call of this form can have the mask of a case, or None.
    find_mask_refusal: Callable[[StoredCase, StorageSpec, Sides], str | None] = accept_all_masks
    # Returns the left side of the widest window for which a layout holds all keys that queries see, from the layout and
    # the number of first tokens that they see besides; None if the layout holds all keys.
    find_widest_left: Callable[[Storage, int], int | None] = allow_any_left
    # Draws the place of each query and key in memory; None if operands stay dense.
    draw_layout: Callable[[StoredCase, StorageSpec], Storage] | None
    describe_layout: Callable[[Storage], str] | None = None  # describes a drawn layout in a phrase
    operands: tuple[str, ...] = ("q", "k", "v")  # the names of the positional arguments of a user's function
    tables: tuple[str, ...] = ()  # the names of the arrays of a layout that the call gets by keyword
    parameters: tuple[str, ...]  # every keyword parameter that a user's function may have
    # The keyword parameters that a function of this form must have, each with a description.
    required: Mapping[str, str]
    marks: tuple[str, ...] = ()  # keyword parameters by which a user's function is recognised as one of this form
    noun: str  # a noun for the operands of this form, for messages
    # The ways in which a function may take the scales of a quantised cache; empty if it takes none.
    scales: tuple[ScaleParameters, ...] = ()
    example: str  # the storage in a case id, for an example with one sequence and T = S = 128 or one query
    # Turns gathered keys and values, `[*held.shape, K, depth]`, into the arguments of the call.
    arrange: Callable[[Mapping[str, Any]], dict[str, Any]] = keep_layout
    level: str  # the name of the form among the levels to which a report attributes failures
    condition: str  # the words after "where" in a report's sentence about such a level, such as "operands are paged"

    @property
    def is_dense(self) -> bool:
        """Whether operands stay dense: then masks and optional operands are those of a dense call too."""
        return self.draw_layout is None

    @property
    def syntax(self) -> str:
        """The syntax of the form in a case id, for messages; `P` stands for the size."""
        return "|".join(prefix + ("P" if self.unit else "") for prefix in self.prefixes.values())

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """The pattern of the storage in a case id; its groups are the prefix, the size and the numbers of queries."""
        prefixes = "|".join(self.prefixes.values())
        return re.compile(rf"({prefixes}){'([1-9][0-9]*)' if self.unit else '()'}(?:-q([0-9]+(?:-[0-9]+)*))?")

    def format(self, size: int | None, q_lengths: tuple[int, ...], *, shared: bool = False) -> str:
        """Format the storage as a case id writes it, for sequences with these numbers of queries."""
        first = self.prefixes[shared] + ("" if size is None else str(size))
        if len(set(q_lengths)) == 1 or not self.has_q_lengths:
            return first
        return "-".join((f"{first}-q{q_lengths[0]}", *map(str, q_lengths[1:])))
