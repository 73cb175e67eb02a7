"""Recognise plain functions that take stored operands (packed, paged, latent, ring buffer) by their parameters.

- A function with a latent in place of keys and values is recognised by the latent's name. Any other is recognised by a
  keyword that marks its storage form (`cases.storage_forms.form_registry.find_form`).
- A function need not take `num_seqs`. Without it, table entries past the last sequence describe sequences that have no
  queries and no keys.
- A paged function with all of `k`, `v`, `k_pages` and `v_pages` writes pages. It gets these four by name, in any order.
- A function with a pair of parameters for scales takes caches with such scales. It takes caches without scales only if
  both parameters have defaults.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

from cases import mask_spec
from cases.case import Case
from cases.masks import Mask
from cases.quantization import WHOLE_CACHES
from cases.storage_forms.form_registry import FORMS
from cases.storage_forms.mask_sides import Sides, find_sides
from cases.storage_forms.packed_form import compute_max_seqs
from cases.storage_forms.page_writes import PAGE_ARRAYS
from cases.storage_forms.storage_form import StorageForm
from cases.storage_forms.stored_cases import lower_sides

_WRITTEN = ("k", "v", *PAGE_ARRAYS)
SCALE_PARAMETERS = tuple(name for form in FORMS.values() for pair in form.scales for name in pair.names)
"""The names of the parameters for scales of quantised caches, for all storage forms."""


def is_page_writer(signature: inspect.Signature) -> bool:
    """Return whether a paged function writes pages: it then takes the new tokens `k`, `v` besides the pages."""
    names = list(signature.parameters)
    return set(_WRITTEN) <= set(names) and set(names[1:3]) < set(_WRITTEN)


def list_writer_options(signature: inspect.Signature) -> tuple[str, ...]:
    """Return the keywords that a function that writes pages may have; scales and lists of keys are not among them."""
    read = (name for name in FORMS["paged"].parameters if name not in (*SCALE_PARAMETERS, "indices"))
    return (*read, *(name for name in _WRITTEN if name not in list(signature.parameters)[:3]))


def call_page_writer(
    function: Callable[..., Any], signature: inspect.Signature, operands: tuple[Any, ...], options: Mapping[str, Any]
) -> Any:
    """Call a function that writes pages, whose parameters may stand in any order.

    `operands` are q, k, v, k_pages and v_pages in this order. The function gets q and its next two parameters by
    position, and the rest by name.
    """
    by_name = dict(zip(_WRITTEN, operands[1:], strict=True))
    first = [by_name.pop(name) for name in list(signature.parameters)[1:3]]
    return function(operands[0], *first, **by_name, **options)


def describe_missing_parameters(parameters: Collection[str], form: StorageForm) -> str:
    """Describe the parameters that a function of this storage form lacks, for an error message; "" if it lacks none."""
    begun = [pair for pair in form.scales if set(pair.names) & set(parameters)]
    required = dict(form.required)
    for pair in begun:
        required |= dict(zip(pair.names, pair.descriptions, strict=True))
    missing = [f"{name!r} ({about})" for name, about in required.items() if name not in parameters]
    if not missing:
        return ""
    has = [name for name in _list_telling_names(form) if name in parameters]
    return (
        f"takes {' and '.join(map(repr, has))}, as functions of {form.noun} do, but lacks {' and '.join(missing)}: "
        f"wrap it so that it takes {form.noun} as docs/contract.md, section 8, describes"
    )


def _list_telling_names(form: StorageForm) -> tuple[str, ...]:
    """Return the names of parameters by which a function is recognised to take stored operands."""
    if form.is_tied:
        return form.operands[1:]
    tables = (name for other in (FORMS["paged"], *FORMS.values()) for name in other.tables)
    return tuple(dict.fromkeys((*tables, *SCALE_PARAMETERS)))


def find_scale_features(parameters: Collection[str], form: StorageForm | None) -> frozenset[str]:
    """Return the features of quantised caches that a function with these parameters offers."""
    taken = (pair.features for pair in (form.scales if form else ()) if set(pair.names) <= set(parameters))
    return frozenset[str]().union(*taken)


def find_required_scales(signature: inspect.Signature, form: StorageForm | None) -> tuple[str, ...]:
    """Return the scale parameters of a function that have no default: it cannot take a cache without these scales."""
    names = (name for pair in (form.scales if form else ()) for name in pair.names)
    own = (signature.parameters[name] for name in names if name in signature.parameters)
    return tuple(p.name for p in own if p.default is p.empty)


def find_unsupported(case: Case, parameters: Collection[str], form: str, *, needed: tuple[str, ...] = ()) -> str | None:
    """Return why a function with these parameters does not support `case`, or None if it does.

    The function must have a parameter for the mask of the case. The case must have the scales that the function needs.
    """
    described = FORMS[form]
    whole = case.kv_cache in WHOLE_CACHES
    pairs = (pair for pair in described.scales if case.kv_cache is not None and pair.as_numbers == whole)
    given = [name for pair in pairs for name in pair.names]
    if missing := [name for name in needed if name not in given]:
        return f"{missing[0]}: the function needs {' and '.join(missing)}, and the pages of this case have none"
    mask = mask_spec.build_mask(case.mask, case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)
    sides = find_sides(mask, case.q_length, case.kv_length)
    if sides is None or sides == Sides() or "window" in parameters:
        return None
    if sides == Sides(None, 0):
        allowed = described.is_cache or "causal" in parameters
        return None if allowed else "causal: the function has no parameter 'causal'"
    return "window: the function has no parameter 'window'"


def find_empty_sequence(case: Case, parameters: Collection[str], form: str) -> str | None:
    """Return which stored sequence has no queries or keys, or None. Without `num_seqs`, unused table entries count."""
    for what, lengths in (("queries", case.q_lengths), ("keys", case.kv_lengths)):
        if 0 in lengths:
            return f"empty_sequences: a sequence has no {what}, and the function declares that all have some"
    has_unused = "num_seqs" in FORMS[form].tables and compute_max_seqs(case) > case.batch
    if has_unused and "num_seqs" not in parameters:
        return "empty_sequences: without 'num_seqs', unused entries of the tables are sequences without tokens"
    return None


def build_lowering(
    parameters: Collection[str], form: str
) -> Callable[[Mask, int, int, int, int], tuple[Mapping[str, Hashable], Mapping[str, Any]]]:
    """Build `Implementation.lower_mask`. A causal mask becomes `causal=True` if accepted, or the window `(None, 0)`."""

    def lower(
        mask: Mask, batch: int, num_q_heads: int, q_length: int, kv_length: int
    ) -> tuple[Mapping[str, Hashable], Mapping[str, Any]]:
        static, arrays = lower_sides(mask, batch, num_q_heads, q_length, kv_length, form=form)
        if FORMS[form].is_cache and "causal" in parameters:
            return {**static, "causal": True}, arrays
        if "causal" in static and "causal" not in parameters:
            return {"window": (None, 0)}, arrays
        return static, arrays

    return lower
