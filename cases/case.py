"""Define a case: one attention problem, named by a readable id that parses back to it.

    train/bf16/B2.T128.S128.N4.K2.H64.V64/causal/seg/softcap30/sinks/normal/s7

The components, between slashes, are: phase, dtype, shape, mask; then the optional operands that the case has, in the
order of `cases.operand_registry.OPTIONAL`; then dropout (`cases.dropout_cases`), the storage form
(`cases.storage_forms`) and the front end (`cases.front_ends`) if the case has them; then the value distribution and the
seed. Ids use letters, digits and `. / _ -` only, so that a shell and pytest's `-k` take them unquoted.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from cases import front_ends, mask_spec, quantization, score_functions
from cases.case_fields import DISTRIBUTIONS, DTYPES, PHASES, CaseFields
from cases.masks import FIRST_TOKENS, LOCAL_WINDOW, Listed, Mask, Tree, iter_leaves, list_conjuncts
from cases.operand import OptionalOperand
from cases.operand_registry import OPTIONAL, REMOVABLE
from cases.storage_forms import form_registry
from cases.storage_forms.mask_sides import (
    Sides,
    find_first_tokens,
    find_kv_lengths,
    find_sides,
    sees_no_later_key,
)
from cases.storage_forms.storage_form import StorageSpec


class CaseIdError(ValueError):
    """Raised for a string that is not a case id. The message names the wrong component and says what would be right."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(CaseFields):
    """One attention problem: its fields, which are validated, and what follows from them."""

    def __post_init__(self) -> None:
        _check_choice("phase", self.phase, PHASES)
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("distribution", self.distribution, DISTRIBUTIONS)
        for operand in OPTIONAL:
            _check_operand(operand, getattr(self, operand.field))
        if self.kv_cache is not None and self.phase == "train":
            raise CaseIdError(f"{self.kv_cache} is a cache: phase must be 'prefill' or 'decode', got 'train'")
        if self.dropout_rate is not None:
            self._check_dropout(self.dropout_rate)
        if self.q_fp8 and not (self.storage is not None and (self.kv_cache or "").startswith("kvfp8")):
            raise CaseIdError("qfp8 is for queries over pages in fp8: the case needs storage and such a cache")
        if self.score in score_functions.CAPPING and self.soft_cap is not None:
            raise CaseIdError(f"{self.score} is a soft cap: the case has another, {self.soft_cap}")
        sizes = (self.batch, self.q_length, self.kv_length, self.num_q_heads, self.num_kv_heads)
        if min(*sizes, self.head_dim, self.v_head_dim) < 1:
            raise CaseIdError(f"every size must be at least 1, got {self.shape}")
        if self.num_q_heads % self.num_kv_heads:
            raise CaseIdError(f"N={self.num_q_heads} must be a multiple of K={self.num_kv_heads}")
        if not 0 <= self.seed < 2**64:
            raise CaseIdError(f"seed must be in 0..2**64-1, got {self.seed}")
        if self.distribution == "knee" and self.soft_cap is None:
            raise CaseIdError("distribution 'knee' puts logits at the soft cap's knee, so the case needs a soft cap")
        try:
            self.steps  # noqa: B018  raises for impossible steps
            spec = self.stored  # raises for impossible storage
            mask_spec.parse_mask_spec(self.mask)
            self._build_mask()
            if spec is not None:
                form = form_registry.FORMS[spec.form]
                if not form.takes_masks or self._find_sides() != Sides():  # without a mask, queries have no position
                    form.check_lengths(self.storage or "", self.q_lengths, self.kv_lengths)
            taken = () if spec is None else form_registry.FORMS[spec.form].scales
            if self.kv_cache in quantization.READ_CACHES and not any(self.kv_cache in one.caches for one in taken):
                raise ValueError(f"{self.kv_cache} is a cache in pages: the case needs such a storage")
            if not quantization.has_whole_blocks(self.kv_cache, self.head_dim, self.v_head_dim):
                raise ValueError(f"{self.kv_cache} has scales of whole blocks, which do not divide {self.shape}")
        except ValueError as error:
            raise CaseIdError(str(error)) from error

    def _check_dropout(self, rate: float) -> None:
        """Raise `CaseIdError` unless weights may be dropped at this rate in this case."""
        if not 0 < rate < 1:
            raise CaseIdError(f"the dropout rate must be above 0 and below 1, got {rate}")
        if self.storage is not None or self.front_end is not None or self.kv_cache is not None:
            raise CaseIdError("dropout is judged on dense operands only, without a cache and a front end")

    @property
    def steps(self) -> tuple[str, ...]:
        """The steps of the front end (norms, rotary positions, scales), in order; empty without a front end."""
        return (
            () if self.front_end is None else front_ends.parse_front_end(self.front_end, self.head_dim, self.v_head_dim)
        )

    @property
    def stored(self) -> StorageSpec | None:
        """The parsed storage form of the operands, such as pages; None if the operands are dense."""
        if self.storage is None:
            return None
        spec = form_registry.parse_storage(self.storage, self.batch, self.q_length)
        form = form_registry.FORMS[spec.form]
        if form.is_cache and self.phase == "train":
            raise ValueError(f"storage {self.storage!r} is a cache: phase must be 'prefill' or 'decode', got 'train'")
        extra = self.kv_cache if self.front_end is None else f"front-{self.front_end}"
        form.check_sizes(self.storage, self.num_kv_heads, self.head_dim, self.v_head_dim, extra)
        return spec

    @functools.cached_property
    def q_lengths(self) -> tuple[int, ...]:
        """The number of queries of each sequence: `T`, or fewer where the storage form gives each its own number."""
        return (
            (self.q_length,) * self.batch
            if (spec := self.stored) is None
            else spec.get_q_lengths(self.batch, self.q_length)
        )

    @functools.cached_property
    def kv_lengths(self) -> tuple[int, ...]:
        """The number of keys of each sequence: the lengths of the mask if it has lengths, otherwise `S`."""
        return find_kv_lengths(self._build_mask(), self.batch, self.kv_length)

    @functools.cached_property
    def first_tokens(self) -> int:
        """The number of first tokens of each sequence that all its queries see, besides a window."""
        return find_first_tokens(self._build_mask())

    @property
    def id(self) -> str:
        """The readable id; `parse_case_id(case.id) == case`."""
        components = [self.phase, self.dtype, self.shape, self.mask]
        values = ((operand, getattr(self, operand.field)) for operand in OPTIONAL)
        components += [operand.write(value) for operand, value in values if value != operand.absent]
        if self.q_fp8:
            components.append("qfp8")
        if self.dropout_rate is not None:
            components.append(f"dropout{np.format_float_positional(self.dropout_rate, trim='-')}")
        if self.storage is not None:
            components.append(self.storage)
        if self.front_end is not None:
            components.append(f"front-{self.front_end}")
        return "/".join([*components, self.distribution, f"s{self.seed}"])

    @property
    def program(self) -> str:
        """The id without the distribution. Cases with equal ones differ only in values, and share compiled programs."""
        *components, _, seed = self.id.split("/")
        return "/".join([*components, seed])

    def __str__(self) -> str:
        return self.id

    @functools.cached_property
    def features(self) -> tuple[str, ...]:
        """The names of the features that an implementation needs to compute this case (`FEATURES`)."""
        found = [self.dtype, self.phase]
        if self.num_q_heads == self.num_kv_heads:
            found.append("mha")
        else:
            found.append("mqa" if self.num_kv_heads == 1 else "gqa")
        # A storage form that leaves queries and keys in place takes the same masks as dense operands.
        spec = self.stored
        is_dense = spec is None or form_registry.FORMS[spec.form].is_dense
        found += mask_spec.list_mask_features(self.mask) if is_dense else self._list_stored_mask_features()
        if spec is not None:
            found.append(spec.form)
        if spec is not None and not is_dense and self.segments is not None:
            found.append("packed_segments")
        found += [operand.name for operand in REMOVABLE if getattr(self, operand.field) != operand.absent]
        if self.score in score_functions.CAPTURED:
            found.append("captures")
        if self.dropout_rate is not None:
            found.append("dropout")
        if self.head_dim != self.v_head_dim:
            found.append("v_head_dim")
        if self.q_length != self.kv_length and is_dense:
            found.append("unequal_lengths")
        if self.kv_cache:
            found += quantization.list_cache_features(self.kv_cache)
        if self.q_fp8:
            found.append("q_descale" if self.kv_cache in quantization.SEQUENCE_CACHES else "q_fp8")
        return tuple(found)

    def _list_stored_mask_features(self) -> tuple[str, ...]:
        """Return the mask features of a case with stored operands, without those of key lengths.

        Each stored sequence has a length of its own anyway. So only the mask around a query's position counts.
        """
        assert self.stored is not None
        mask, seen = self._build_mask(), self._find_sides()
        found: tuple[str, ...] = ("window",)
        if seen is None:
            found = ("tree",) if any(isinstance(leaf, Tree) for leaf in iter_leaves(mask)) else ("placed",)
        elif seen.left is None and seen.right in (None, 0):
            found = ("causal" if seen.is_causal else "full",)
        elif seen.first:
            found = ("window", FIRST_TOKENS)
        is_causal = sees_no_later_key(mask) if seen is None else seen.is_causal
        if not is_causal and form_registry.FORMS[self.stored.form].is_cache:
            found = (*found, "later_pages")
        if not any(isinstance(leaf, Listed) for leaf in iter_leaves(mask)):
            return found
        is_alone = any(isinstance(part, Listed) for part in list_conjuncts(mask))
        return (*found, Listed.feature) if is_alone else (*found, Listed.feature, LOCAL_WINDOW)

    def _build_mask(self) -> Mask:
        return mask_spec.build_mask(self.mask, self.batch, self.num_q_heads, self.q_length, self.kv_length, self.seed)

    def _find_sides(self) -> Sides | None:
        return find_sides(self._build_mask(), self.q_length, self.kv_length)


FEATURES: dict[str, str] = {
    "f32": "float32 operands",
    "bf16": "bfloat16 operands",
    "f16": "float16 operands",
    "train": "whole sequences, with gradients",
    "prefill": "a chunk of queries against a longer cache, forward only",
    "decode": "one query against a cache, forward only",
    "mha": "as many key/value heads as query heads",
    "gqa": "query heads share key/value heads in groups",
    "mqa": "all query heads share one key/value head",
    **mask_spec.FEATURES,
    **{operand.name: operand.description for operand in REMOVABLE},
    "captures": "functions of places that capture arrays",
    "dropout": "weights dropped at random, by a key or a mask",
    "v_head_dim": "value depth other than key depth",
    "unequal_lengths": "T != S",
    **form_registry.FEATURES,
    "later_pages": "paged calls that are not causal: queries see keys after their own position",
    "packed_segments": "segment ids inside packed sequences",
    "kv_int8": "keys and values stored as int8, with scales",
    "kv_int4": "keys and values stored as int4, with scales",
    "kv_fp8": "keys and values stored as float8_e4m3fn, with scales",
    "kv_token_scales": "a scale of stored keys and values for each token and head",
    "kv_head_scales": "a scale of stored keys and values for each head",
    "kv_tensor_scales": "one scale for all stored keys and one for all values",
    "kv_sequence_scales": "a scale of stored keys and values for each sequence and head",
    "kv_mxfp8": "keys and values stored as mxfp8: float8_e4m3fn, with a scale for each 32 coordinates",
    "kv_nvfp4": "keys and values stored as nvfp4: float4_e2m1fn, with a scale for each 16 coordinates and one for all",
    "kv_channel_scales": "keys stored as uint8 by channel in pages, values by token, with scales and zero points",
    "kv_writes_scaled": "new keys and values divided by given scales and written as int8 or fp8",
    "kv_writes_computed": "new keys and values written as int8 or fp8 with scales that are computed and written too",
    "q_fp8": "queries as float8_e4m3fn, with one scale for all",
    "q_descale": "queries as float8_e4m3fn, with a scale for each sequence and key/value head",
}
KV_FEATURES = frozenset(name for name in FEATURES if name.startswith("kv_"))
OPERAND_FEATURES = frozenset(operand.name for operand in REMOVABLE) | KV_FEATURES | {"q_fp8", "q_descale"}
"""Features that a case has because of its optional operands."""

OPT_IN = (
    mask_spec.OPT_IN
    | {"captures", "dropout", "later_pages", "packed_segments", "q_fp8", "q_descale"}
    | {operand.name for operand in REMOVABLE if operand.opt_in}
    | KV_FEATURES
    | set(form_registry.FORMS)
)
"""Features that an implementation supports only if it declares them: they need an algorithm of their own."""


def _check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise `CaseIdError`, naming the field, unless `value` is one of `choices`."""
    if value not in choices:
        raise CaseIdError(f"{name} {value!r} is none of {', '.join(choices)}")


def _check_operand(operand: OptionalOperand, value: Any) -> None:
    """Raise `CaseIdError` unless `value` is a level of the operand, or a positive finite number."""
    if value == operand.absent:
        return
    if operand.number is None:
        _check_choice(operand.field, value, (*operand.levels, *operand.stored_levels))
    elif not 0 < value < math.inf:
        raise CaseIdError(f"{operand.name.replace('_', ' ')} must be positive and finite, got {value}")
