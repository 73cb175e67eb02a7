"""Decide by a plain function's parameters which cases it supports, and how a mask is passed to it.

A plain function is an attention function without further declarations (`conformance.execution.plain_functions`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import numpy as np

from cases import mask_spec
from cases.case import Case
from cases.masks import (
    LOCAL_WINDOW,
    Causal,
    Full,
    Lengths,
    Listed,
    Mask,
    MaskFunction,
    Window,
    has_formula,
    list_conjuncts,
    split_lists,
)
from cases.moba_mask import Moba, depends_on_data
from cases.parameter_names import find_operand
from cases.storage_forms.form_registry import FORMS
from conformance.execution import plain_storage
from impls.contract.argument_validation import validate_arguments
from impls.contract.declarations import CausalFrom, OpenSide
from impls.contract.implementation import Lowering

_PARAMETER_OF = {Causal: ("causal", "causal"), Window: ("window", "window"), Lengths: ("lengths", "kv_lengths")}
"""The feature and the parameter of a plain function for each mask that has a parameter besides `mask`."""


def suggest_parameters(name: str, others: Iterable[str]) -> str:
    """Return a hint that names parameters like `name`, such as `is_causal` for `causal`; "" if there are none."""
    alike = [repr(other) for other in others if name in other or find_operand(other) == name]
    return f" (nothing is passed to its {' and '.join(alike)})" if alike else ""


@validate_arguments
@dataclasses.dataclass(frozen=True)
class PlainSupport:
    """A callable that says whether a plain function supports a case, by its signature and its declarations."""

    parameters: frozenset[str]  # the names of the optional parameters that the function has and the harness knows
    # `"start"` or `"end"`, how `causal=True` and `window` align queries with keys if T differs from S.
    causal: CausalFrom
    narrow: bool  # whether the function's logits or softmax are in the dtype of the operands
    # The name of the storage form in which the function takes its operands; None if they are dense.
    storage: str | None = None
    others: tuple[str, ...] = ()  # the names of further parameters, to which the harness passes nothing
    # The names of the scale parameters without a default; without scales the function cannot take a cache.
    scales: tuple[str, ...] = ()
    lists: bool = False  # whether `indices` has no default: without lists of keys the function cannot be called
    empty_sequences: bool = True  # whether stored sequences may have no queries or no keys
    multiple: int = 1  # the number of which both lengths are multiples, since devices share them

    def __call__(self, case: Case) -> str | None:
        """Return why the function does not support `case`, or None if it does."""
        if self.narrow and case.dtype == "f16" and case.distribution == "huge":
            return "huge: logits beyond 65504, the largest f16 number, and the function declares logits in f16"
        if self.lists and "indices" not in case.features:
            return "indices: the function needs lists of keys, and this case has none"
        if self.storage is not None and not FORMS[self.storage].is_dense:
            if not self.empty_sequences and (
                refusal := plain_storage.find_empty_sequence(case, self.parameters, self.storage)
            ):
                return refusal
            return plain_storage.find_unsupported(case, self.parameters, self.storage, needed=self.scales)
        if case.q_length % self.multiple or case.kv_length % self.multiple:
            return f"lengths {case.q_length} and {case.kv_length}: no multiples of {self.multiple}, for the devices"
        is_chosen = "moba" in case.features
        if case.mask == "full" or ("mask" in self.parameters and not is_chosen and not self.lists):
            return None
        mask = mask_spec.build_mask(case.mask, case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)
        first = _compute_offset(self.causal, case.q_length, case.kv_length)
        _, arrays, left = _split_mask(mask, self.parameters, first)
        if self.lists and "indices" not in arrays:
            return "local_window: the function needs lists of keys, and takes no such keys beside them"
        if left is None or ("mask" in self.parameters and not depends_on_data(left)):
            return None
        if is_chosen:
            return "moba: the chunks do not begin where the function aligns queries, or beside another mask"
        part = next(iter(list_conjuncts(left)))
        kind, wanted = _PARAMETER_OF.get(type(part), (mask_spec.list_mask_features(case.mask)[0], ""))
        if isinstance(part, Causal | Window) and wanted in self.parameters and part.offset != first:
            ends = {0: "start", case.kv_length - case.q_length: "end"}
            where = f"at the {ends[part.offset]}" if part.offset in ends else "at neither end"
            return f"{kind}: {where}, and the function declares it at the {self.causal}"
        lacking = [name for name in (wanted, "mask") if name and name not in self.parameters]
        alike = suggest_parameters(wanted or kind, self.others) or suggest_parameters("mask", self.others)
        said = (
            "mask_mod takes a formula of indices, this mask is an array, and " if "mask_mod" in self.parameters else ""
        )
        return f"{kind}: {said}the function has no parameter {' or '.join(map(repr, lacking))}{alike}"


def replace_open_sides(lower: Lowering, open_side: OpenSide) -> Lowering:
    """Return `lower` with None for an open side of `window` replaced by -1, or by the larger of both lengths."""

    def replaced(
        mask: Mask, batch: int, num_q_heads: int, q_length: int, kv_length: int
    ) -> tuple[Mapping[str, Hashable], Mapping[str, Any]]:
        static, arrays = lower(mask, batch, num_q_heads, q_length, kv_length)
        number = max(q_length, kv_length) if open_side == "length" else open_side
        if isinstance(window := static.get("window"), tuple):
            static = {**static, "window": tuple(number if side is None else side for side in window)}
        return static, arrays

    return replaced if open_side is not None else lower


def _compute_offset(causal: CausalFrom, q_length: int, kv_length: int) -> int:
    """Return the index of the key that `causal=True` and `window` align with the first query."""
    return 0 if causal == "start" else kv_length - q_length


def _split_mask(
    mask: Mask, parameters: frozenset[str], first: int
) -> tuple[dict[str, Hashable], dict[str, np.ndarray], Mask | None]:
    """Split a mask into arguments for a function with these parameters, and the rest of the mask.

    A mask is a conjunction. A conjunct becomes an argument if the function has the parameter for it: `causal`,
    `window`, `kv_lengths` for lengths, `indices` for lists of keys, `moba`, or `mask_mod` for a formula of indices. A
    window beside the lists becomes `local_window`.
    `first` is the index of the key that is aligned with the first query.

    Returns:
      The static arguments and the array arguments by name, and the conjunction of all other conjuncts, or None if there
      are none.
    """
    static: dict[str, Hashable] = {}
    arrays: dict[str, np.ndarray] = {}
    functions: Mask | None = None
    left: Mask | None = None
    found = split_lists(mask)
    local = found.local if found is not None and parameters.issuperset({"indices", LOCAL_WINDOW}) else None
    if found is not None and isinstance(local, Window) and local.offset == first:
        static[LOCAL_WINDOW], mask = (local.left, local.right), found.rest & found.lists
    for part in list_conjuncts(mask):
        if isinstance(part, Full):
            continue
        if part == Causal(first) and "causal" in parameters and "causal" not in static:
            static["causal"] = True
        elif isinstance(part, Window) and part.offset == first and "window" in parameters and "window" not in static:
            static["window"] = (part.left, part.right)
        elif isinstance(part, Lengths) and "kv_lengths" in parameters and "kv_lengths" not in arrays:
            arrays["kv_lengths"] = np.asarray(part.lengths, np.int32)
        elif isinstance(part, Listed) and "indices" in parameters and "indices" not in arrays:
            arrays["indices"] = part.indices
        elif isinstance(part, Moba) and part.offset == first and "moba" in parameters:
            static["moba"] = (part.chunk, part.topk)
        elif "mask_mod" in parameters and has_formula(part):
            functions = part if functions is None else functions & part
        else:
            left = part if left is None else left & part
    if functions is not None:
        static["mask_mod"] = MaskFunction(functions)
    return static, arrays, left


def build_lowering(
    parameters: frozenset[str], causal: CausalFrom
) -> Callable[[Mask, int, int, int, int], tuple[Mapping[str, Hashable], Mapping[str, np.ndarray]]]:
    """Build `Implementation.lower_mask`, which turns a mask into arguments of a function with these parameters."""

    def lower(
        mask: Mask, batch: int, num_q_heads: int, q_length: int, kv_length: int
    ) -> tuple[Mapping[str, Hashable], Mapping[str, np.ndarray]]:
        static, arrays, left = _split_mask(mask, parameters, _compute_offset(causal, q_length, kv_length))
        return static, arrays if left is None else {**arrays, "mask": left.dense(q_length, kv_length)}

    return lower
