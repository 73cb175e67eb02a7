"""Decide which cases a kernel of a storage form can be judged on, and derive other cases of stored sequences.

This module also lowers masks to the arguments of a stored call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Mapping
from typing import Any

import numpy as np

from cases import mask_spec
from cases.case import Case
from cases.masks import LOCAL_WINDOW, Mask, MaskFunction, Tree, iter_leaves, split_lists
from cases.operand_registry import OPTIONAL
from cases.quantization import WRITTEN_CACHES
from cases.storage_forms.form_cases import load_form_cases
from cases.storage_forms.form_registry import FORMS
from cases.storage_forms.mask_sides import (
    Sides,
    find_kv_lengths,
    find_lists,
    find_local_sides,
    find_sides,
    is_placed,
    read_formula,
    remove_lists,
    sees_no_later_key,
)
from cases.storage_forms.page_writes import find_write_refusal
from cases.storage_forms.storage_form import FIRST_PARAMETER


def lower_stored_mask(
    mask: Mask,
    batch: int,
    num_q_heads: int,
    q_length: int,
    kv_length: int,
    *,
    form: str,
    parameters: Collection[str] | None = None,
) -> tuple[Mapping[str, Hashable], Mapping[str, np.ndarray]]:
    """Lower a mask to the arguments of a stored call (docs/contract.md, section 8).

    A mask with sides becomes `causal` or `window`, which count keys from each query's own position. Any other becomes
    `mask_mod`, a formula of the query's position in its sequence, or booleans. A call that reads a cache is causal
    unless it gets `causal=False`. A cache that keeps the first tokens gets their number as `num_sink_tokens`. Lists of
    keys become `indices`, and a window beside them `local_window`.

    Args:
      parameters: the parameters that the call has; None for a call that takes whatever there is.

    Returns:
      The static keyword arguments of the call, and its array arguments: booleans `[b, n, T, S]` and lists `[B, T, k]`
      of the dense problem, under the names of the parameters that get them in the form of
      `conformance.execution.stored_calls`.

    Raises:
      NotImplementedError: the call has no parameter for the mask; the message names it.
    """
    del num_q_heads
    arrays: dict[str, np.ndarray] = {}
    parts = split_lists(mask)
    near = find_local_sides(mask, q_length, kv_length)
    if (lists := find_lists(mask, find_kv_lengths(mask, batch, kv_length))) is not None:
        arrays["indices"], mask = lists, remove_lists(mask)
    described, sides = FORMS[form], find_sides(mask, q_length, kv_length)
    if sides is not None and sides.first and FIRST_PARAMETER not in described.parameters:
        sides = None  # the window alone would leave the first tokens out
    is_causal = sides.is_causal if sides is not None else sees_no_later_key(mask)
    if not described.takes_masks and (sides is None or (described.is_cache and not is_causal)):
        raise NotImplementedError(f"mask: a {form} call has no such mask")

    def takes(name: str) -> bool:
        return parameters is None or name in parameters

    if arrays and not ("indices" in described.parameters and takes("indices")):
        raise NotImplementedError("indices: the function has no parameter 'indices'")
    static: dict[str, Hashable] = {}
    if parts is not None and parts.local is not None:
        if near is None or not takes(LOCAL_WINDOW):
            raise NotImplementedError(f"{LOCAL_WINDOW}: the function has no parameter {LOCAL_WINDOW!r}")
        static[LOCAL_WINDOW] = (near.left, near.right)
    if described.is_cache:
        if not is_causal and not takes("causal"):
            raise NotImplementedError("causal: the function has no parameter 'causal', which would be False")
        if not is_causal or (parameters is not None and "causal" in parameters):
            static["causal"] = is_causal
    if sides is not None and sides.first and not takes(FIRST_PARAMETER):
        raise NotImplementedError(f"{FIRST_PARAMETER}: the function has no parameter {FIRST_PARAMETER!r}")
    if sides is not None and (sides.first or FIRST_PARAMETER in (parameters or ())):
        static[FIRST_PARAMETER] = sides.first
    if sides == Sides() or (described.is_cache and sides == Sides(None, 0)):
        return static, arrays
    if sides == Sides(None, 0) and takes("causal"):
        return {**static, "causal": True}, arrays
    if sides is not None and takes("window"):
        return {**static, "window": (sides.left, sides.right)}, arrays
    if not described.takes_masks:
        wanted = "causal" if sides == Sides(None, 0) else "window"
        raise NotImplementedError(f"{wanted}: the function has no parameter {wanted!r}")
    if (formula := read_formula(mask)) is not None and takes("mask_mod"):
        return {**static, "mask_mod": MaskFunction(formula)}, arrays
    is_tree = any(isinstance(leaf, Tree) for leaf in iter_leaves(mask))
    names = ("tree_mask", "parents", "mask") if is_tree else ("mask",)
    for name in names:
        if takes(name):
            allowed = mask.dense(q_length, kv_length)
            if allowed.shape[1] > 1:
                raise NotImplementedError(f"mask_mod: {name} has no axis of heads, by which the mask differs")
            return static, {**arrays, name: allowed}
    wanted = "window" if sides is not None else "mask_mod" if formula is not None else names[0]
    raise NotImplementedError(f"{wanted}: the function has no parameter {wanted!r}")


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
        taken = operand.stored or scaled or operand.name in described.further_operands
        if not taken and getattr(case, operand.field) != operand.absent:
            return f"{operand.name}: a {form} call has no such operand"
    if case.kv_cache is not None and not any(case.kv_cache in one.caches for one in described.scales):
        return f"kv_scales: {described.noun} do not hold {case.kv_cache}"
    if case.kv_cache is not None and writes != (case.kv_cache in WRITTEN_CACHES):
        return f"kv_scales: {case.kv_cache} is for calls that {'read' if writes else 'write'} pages"
    if "indices" in case.features and "indices" not in described.parameters:
        return f"indices: no {form} call has lists of keys"
    mask = mask_spec.build_mask(case.mask, case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)
    sides = find_sides(mask, case.q_length, case.kv_length)
    if sides is None or (described.is_cache and not sides.is_causal):
        if not described.takes_masks or not is_placed(mask, case.q_length, case.kv_length):
            return f"{case.mask}: the masks of a {form} call must count keys from each query's own position"
        if sides != Sides() and any(0 < n < q for q, n in zip(case.q_lengths, case.kv_lengths, strict=True)):
            return f"{case.mask}: a query before the first key of its sequence has no position"
    sides = sides or Sides()
    if sides.first and FIRST_PARAMETER not in described.parameters:
        return f"first_tokens: a {form} call keeps no first tokens"
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
    if case.first_tokens:  # the tokens that the storage keeps
        return tuple(f"own-l{left}-f{case.first_tokens}-{ends}" for left in (9, 2))
    return *(f"own-l{left}-{ends}" for left in (9, 2, "inf")), f"lengths-{ends}"
