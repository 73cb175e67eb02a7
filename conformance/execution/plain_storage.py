"""Recognise plain functions that take stored operands (packed, paged, latent, ring buffer) by their parameters.

- A function with a latent in place of keys and values is recognised by the latent's name. Any other is recognised by a
  keyword that marks its storage form (`cases.storage_forms.form_registry.find_form`).
- A function need not take `num_seqs`. Without it, table entries past the last sequence describe sequences that have no
  queries and no keys.
- A paged function with all of `k`, `v`, `k_pages` and `v_pages` writes pages. It gets these four by name, in any order.
- A function with `c_kv`, `k_pe` and `latent_pages`, or with `latent` and `latent_pages`, writes latents into pages. It
  gets all operands by name.
- A function with a pair of parameters for scales takes caches with such scales, and writes such caches if it writes
  pages. It takes caches without scales only if both parameters have defaults.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

from cases import mask_spec
from cases.case import Case
from cases.masks import Mask
from cases.storage_forms.form_registry import FORMS
from cases.storage_forms.packed_form import compute_max_seqs
from cases.storage_forms.page_writes import WRITE_FORMS, WriteForm
from cases.storage_forms.storage_form import ScaleParameters, StorageForm
from cases.storage_forms.stored_cases import lower_stored_mask

UPDATE = "update_kv_cache"
"""The parameter of a function that writes pages, with which it may be told not to."""
_PAGED, _LATENTS = WRITE_FORMS["paged"], WRITE_FORMS["latent_pages"]
_WHOLE_LATENTS = WriteForm(("q",), ("latent",), _LATENTS.pools)  # queries and new latents each in one array
_WRITTEN = (*_PAGED.tokens, *_PAGED.pools)
SCALE_PARAMETERS = tuple(name for form in FORMS.values() for pair in form.scales for name in pair.names)
"""The names of the parameters for scales of quantised caches, for all storage forms."""


def find_latent_writes(parameters: Collection[str]) -> WriteForm | None:
    """Return the operands of a function with these parameters that writes latents into pages; None for another one."""
    if not parameters or not set(_LATENTS.pools) <= set(parameters):
        return None
    return next((made for made in (_LATENTS, _WHOLE_LATENTS) if set(made.tokens) & set(parameters)), None)


def find_write_form(signature: inspect.Signature, form: StorageForm | None) -> WriteForm | None:
    """Return the operands of a function that writes pages, and so takes new tokens besides them; None for others."""
    names = list(signature.parameters)
    if form is FORMS["latent_pages"]:
        return find_latent_writes(names)
    writes = form is FORMS["paged"] and set(_WRITTEN) <= set(names) and set(names[1:3]) < set(_WRITTEN)
    return _PAGED if writes else None


def list_writer_options(signature: inspect.Signature, form: StorageForm, made: WriteForm) -> tuple[str, ...]:
    """Return the keywords that a function that writes pages may have."""
    unwritten = {name for pair in form.scales for name in pair.names if not pair.written_features}
    read = (name for name in form.parameters if name not in unwritten)
    first = list(signature.parameters)[:3] if made is _PAGED else ()
    return (*read, UPDATE, *(name for name in made.operands if name not in first))


def call_page_writer(
    function: Callable[..., Any],
    signature: inspect.Signature,
    made: WriteForm,
    operands: tuple[Any, ...],
    options: Mapping[str, Any],
) -> Any:
    """Call a function that writes pages, whose parameters may stand in any order.

    `operands` are those of `WRITE_FORMS`, in this order. A paged function gets q and its next two parameters by
    position, and the rest by name. A function over latents gets all by name.
    """
    if made is not _PAGED:
        return function(**_name_latents(made, signature, operands), **options)
    by_name = dict(zip(_WRITTEN, operands[1:], strict=True))
    first = [by_name.pop(name) for name in list(signature.parameters)[1:3]]
    return function(operands[0], *first, **by_name, **options)


def _name_latents(made: WriteForm, signature: inspect.Signature, operands: tuple[Any, ...]) -> dict[str, Any]:
    """Name the operands of a function that writes latents, with the depth of values if it has a parameter for it."""
    by_name = dict(zip(_LATENTS.operands, operands, strict=True))
    depth = {"value_dim": by_name["c_kv"].shape[-1]} if "value_dim" in signature.parameters else {}
    if made is _WHOLE_LATENTS:
        import jax.numpy as jnp  # imported late, since plain functions are also read without JAX

        q, latent = (
            jnp.concatenate([by_name.pop(part) for part in parts], -1) for parts in (_LATENTS.queries, _LATENTS.tokens)
        )
        by_name |= {"q": q, "latent": latent}
    return {**by_name, **depth}


def describe_missing_parameters(parameters: Collection[str], form: StorageForm) -> str:
    """Describe the parameters that a function of this storage form lacks, for an error message; "" if it lacks none."""
    begun = [pair for pair in form.scales if _lacks_some(pair, set(parameters), form)]
    required = dict(form.required)
    if made := find_latent_writes(parameters):  # `c_kv` says how deep values are
        required = {**dict.fromkeys(made.operands, "an operand"), **required}
        required.pop("value_dim")
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


def _lacks_some(pair: ScaleParameters, parameters: set[str], form: StorageForm) -> bool:
    """Return whether a function has parameters of `pair` that no smaller pair and no complete one explains."""
    has = parameters & {*pair.names}
    others = ({*other.names} for other in form.scales)
    return bool(has) and not any(has <= names and (names <= parameters or names < {*pair.names}) for names in others)


def _list_telling_names(form: StorageForm) -> tuple[str, ...]:
    """Return the names of parameters by which a function is recognised to take stored operands."""
    if form.is_tied:
        return form.operands[1:]
    tables = (name for other in (FORMS["paged"], *FORMS.values()) for name in other.tables)
    return tuple(dict.fromkeys((*tables, *SCALE_PARAMETERS)))


def find_scale_features(parameters: Collection[str], form: StorageForm | None, *, writes: bool) -> frozenset[str]:
    """Return the features of quantised caches that a function with these parameters offers."""
    taken = (pair for pair in (form.scales if form else ()) if set(pair.names) <= set(parameters))
    return frozenset[str]().union(*(pair.written_features if writes else pair.features for pair in taken))


def find_required_scales(signature: inspect.Signature, form: StorageForm | None) -> tuple[str, ...]:
    """Return the scale parameters of a function that have no default: it cannot take a cache without these scales."""
    names = [name for pair in (form.scales if form else ()) for name in pair.names]
    names += ["q_scale", "q_descale"] * (form is not None)
    own = (signature.parameters[name] for name in names if name in signature.parameters)
    return tuple(p.name for p in own if p.default is p.empty)


def find_unsupported(case: Case, parameters: Collection[str], form: str, *, needed: tuple[str, ...] = ()) -> str | None:
    """Return why a function with these parameters does not support `case`, or None if it does.

    The function must have a parameter for the mask of the case. The case must have the scales that the function needs.
    """
    described = FORMS[form]
    pairs = (pair for pair in described.scales if case.kv_cache in pair.caches)
    of_queries = "q_descale" if "q_descale" in case.features else "q_scale"
    given = [name for pair in pairs for name in pair.names] + [of_queries] * case.q_fp8
    if missing := [name for name in needed if name not in given]:
        return f"{missing[0]}: the function needs {' and '.join(missing)}, and the pages of this case have none"
    if case.q_fp8 and case.dtype != "bf16" and "out_dtype" not in parameters:
        return "q_fp8: without a parameter 'out_dtype', out of queries in fp8 is in bf16"
    mask = mask_spec.build_mask(case.mask, case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)
    try:
        build_lowering(parameters, form)(mask, case.batch, case.num_q_heads, case.q_length, case.kv_length)
    except NotImplementedError as refusal:
        return str(refusal)
    return None


def _list_mask_parameters(form: StorageForm | None) -> dict[str, tuple[str, ...]]:
    """List the features of masks and segments over stored sequences, each with the parameters that offer it."""
    if form is None or not form.takes_masks:
        return {}
    return {
        "placed": ("mask_mod", "mask"),
        "tree": ("tree_mask", "parents", "mask"),
        **({"later_pages": ("causal",)} if form.is_cache else {}),
        **({"packed_segments": ("segment_ids",)} if "segment_ids" in form.further_operands else {}),
    }


def find_mask_features(signature: inspect.Signature, form: StorageForm | None) -> frozenset[str]:
    """Return the features of masks and segments that a function of stored operands offers by its parameters."""
    needed = _list_mask_parameters(form)
    return frozenset(name for name, parameters in needed.items() if signature.parameters.keys() & set(parameters))


def list_missing_masks(signature: inspect.Signature, form: StorageForm | None) -> dict[str, str]:
    """Return the features of masks and segments that a function of stored operands does not offer, and why."""
    offered = find_mask_features(signature, form)
    return {
        name: f"the function has no parameter {' or '.join(map(repr, parameters))}"
        for name, parameters in _list_mask_parameters(form).items()
        if name not in offered
    }


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
    return functools.partial(lower_stored_mask, form=form, parameters=frozenset(parameters))
