"""Decide which cases a plain function supports by its parameters, and how a mask reaches it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping

import numpy as np

from cases import mask_spec
from cases.case import Case
from cases.masks import Causal, Full, Mask, MaskFunction, Window, has_formula, list_conjuncts
from cases.storage_forms.form_registry import FORMS
from conformance.contract import CausalFrom
from conformance.execution import plain_storage


def suggest_parameters(name: str, others: Iterable[str]) -> str:
    """Return a hint at parameters of similar names, as `is_causal` for `causal`; empty if there are none."""
    alike = [repr(other) for other in others if name in other]
    return f" (nothing is passed to its {' and '.join(alike)})" if alike else ""


@dataclasses.dataclass(frozen=True)
class PlainSupport:
    """The masks and values that a plain function supports, by its signature and its declarations.

    Attributes:
      parameters: the options that it has.
      causal: where queries stand for `causal=True` and `window`.
      narrow: whether its logits are in the dtype of the operands.
      storage: how it takes its operands, none if dense.
      others: its further parameters, to which nothing is passed.
      scales: those without which it takes no pages.
    """

    parameters: frozenset[str]
    causal: CausalFrom
    narrow: bool
    storage: str | None = None
    others: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()

    def __call__(self, case: Case) -> str | None:
        """Return why the function does not support `case`, or None if it does."""
        if self.narrow and case.dtype == "f16" and case.distribution == "huge":
            return "huge: logits beyond 65504, the largest number of f16, in which they are declared to be"
        if self.storage is not None and not FORMS[self.storage].is_dense:
            return plain_storage.find_unsupported(case, self.parameters, self.storage, needed=self.scales)
        if case.mask == "full" or "mask" in self.parameters:
            return None
        mask = mask_spec.build_mask(case.mask, case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)
        _, left = _split_mask(mask, self.parameters, _compute_offset(self.causal, case.q_length, case.kv_length))
        if left is None:
            return None
        kind = mask_spec.list_mask_features(case.mask)[0]
        alike = suggest_parameters(kind, self.others) or suggest_parameters("mask", self.others)
        said = "mask_mod is a function of places, this mask an array, and " if "mask_mod" in self.parameters else ""
        return f"{kind}: {said}the function has no parameter 'mask'{alike}"


def _compute_offset(causal: CausalFrom, q_length: int, kv_length: int) -> int:
    """Return the key at which the first query stands for `causal=True` and `window`."""
    return 0 if causal == "start" else kv_length - q_length


def _split_mask(mask: Mask, parameters: frozenset[str], first: int) -> tuple[dict[str, Hashable], Mask | None]:
    """Split a mask into the parameters that the function has for it, by name, and the rest.

    They are `causal` and `window` if the mask is made of them, and `mask_mod` for the formulas in what is left.
    """
    static: dict[str, Hashable] = {}
    functions: Mask | None = None
    left: Mask | None = None
    for part in list_conjuncts(mask):
        if isinstance(part, Full):
            continue
        if part == Causal(first) and "causal" in parameters and "causal" not in static:
            static["causal"] = True
        elif isinstance(part, Window) and part.offset == first and "window" in parameters and "window" not in static:
            static["window"] = (part.left, part.right)
        elif "mask_mod" in parameters and has_formula(part):
            functions = part if functions is None else functions & part
        else:
            left = part if left is None else left & part
    if functions is not None:
        static["mask_mod"] = MaskFunction(functions)
    return static, left


def build_lowering(
    parameters: frozenset[str], causal: CausalFrom
) -> Callable[[Mask, int, int, int, int], tuple[Mapping[str, Hashable], Mapping[str, np.ndarray]]]:
    """Return how a mask reaches a function with these options: `Implementation.lower_mask`."""

    def lower(
        mask: Mask, batch: int, num_q_heads: int, q_length: int, kv_length: int
    ) -> tuple[Mapping[str, Hashable], Mapping[str, np.ndarray]]:
        static, left = _split_mask(mask, parameters, _compute_offset(causal, q_length, kv_length))
        return static, ({} if left is None else {"mask": left.dense(q_length, kv_length)})

    return lower
