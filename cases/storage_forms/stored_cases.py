"""Decide which cases a kernel of a storage form can be judged on, and derive other cases of stored sequences.

This module also lowers masks to the arguments `causal`, `window` and `indices` of a stored call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

from cases import mask_spec
from cases.case import Case
from cases.masks import Mask
from cases.operand_registry import OPTIONAL
from cases.quantization import PAGES_HOLD
from cases.storage_forms.form_cases import load_form_cases
from cases.storage_forms.form_registry import FORMS
from cases.storage_forms.mask_sides import Sides, find_kv_lengths, find_lists, find_sides
from cases.storage_forms.page_writes import find_write_refusal


def lower_sides(
    mask: Mask, batch: int, num_q_heads: int, q_length: int, kv_length: int, *, form: str
) -> tuple[Mapping[str, Hashable], Mapping[str, Any]]:
    """Lower a mask to the arguments `causal` or `window`, and `indices`, of a stored call.

    The first two count keys from each query's own position. A call that reads a cache is always causal, so it never
    gets `causal`, and gets `window` only if the left side is bounded.

    Returns:
      The static keyword arguments of the call, and its array arguments: `indices`, if the mask has lists of keys.

    Raises:
      NotImplementedError: the mask is neither causal nor such a window.
    """
    del num_q_heads
    lists = find_lists(mask, find_kv_lengths(mask, batch, kv_length))
    arrays = {} if lists is None else {"indices": lists}
    sides, is_cache = find_sides(mask, q_length, kv_length), FORMS[form].is_cache
    if sides is None or (is_cache and not sides.is_causal):
        raise NotImplementedError(f"mask: a {form} call has no such mask")
    if sides == Sides() or (is_cache and sides.left is None):
        return {}, arrays
    return ({"causal": True} if sides == Sides(None, 0) else {"window": (sides.left, sides.right)}), arrays


def find_refusal(case: Case, form: str, *, writes: bool = False) -> str | None:
    """Return why no kernel of a storage form can be judged on `case`, or None if one can.

    Args:
      writes: whether the kernel also writes the new tokens of each sequence into pages.
    """
    if case.stored is None:
        return f"dense operands: the call takes {form} ones"
    if case.stored.form != form:
        return f"{case.stored.form} operands: the call takes {form} ones"
    described = FORMS[form]
    if described.is_dense:  # such a form takes every mask and operand of a dense call, so nothing is refused
        return None
    for operand in OPTIONAL:
        scaled = described.scales and operand.name == "kv_scales"
        if not operand.stored and not scaled and getattr(case, operand.field) != operand.absent:
            return f"{operand.name}: a {form} call has no such operand"
    if case.kv_cache not in PAGES_HOLD:
        return f"kv_scales: pages are int8 or fp8 with a scale per token and head or per tensor, not {case.kv_cache}"
    if case.kv_cache is not None and writes:
        return "kv_scales: no call that writes pages is judged with quantised pages"
    if "indices" in case.features and (writes or "indices" not in described.parameters):
        return f"indices: no {form} call {'that writes pages ' if writes else ''}has lists of keys"
    mask = mask_spec.build_mask(case.mask, case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)
    sides = find_sides(mask, case.q_length, case.kv_length)
    if sides is None or (described.is_cache and not sides.is_causal):
        return f"{case.mask}: the masks of a {form} call must count keys from each query's own position"
    return described.find_mask_refusal(case, case.stored, sides) or (find_write_refusal(case) if writes else None)


def with_length(case: Case, length: int) -> Case:
    """Return `case` with a single sequence of `length` queries and keys, in the same storage form."""
    changed: dict[str, Any] = {"batch": 1, "q_length": length, "kv_length": length}
    if (spec := case.stored) is not None and not FORMS[spec.form].is_dense:
        size = length if load_form_cases(spec.form).has_sized_sequences else spec.size
        storage = FORMS[spec.form].format(size, (length,), shared=spec.shared)
        changed |= {"storage": storage, "mask": f"own-linf-{length}"}
    return dataclasses.replace(case, **changed)


def list_other_masks(case: Case) -> tuple[str, ...]:
    """List mask specs that fit the same stored sequences: windows of several sizes, causal, and no mask."""
    assert case.stored is not None
    if (masks := load_form_cases(case.stored.form).other_masks) is not None:
        return masks
    ends = "-".join(map(str, case.kv_lengths))
    return *(f"own-l{left}-{ends}" for left in (9, 2, "inf")), f"lengths-{ends}"
