"""Declare dot-product attention, with any choice of its options, as an implementation to judge."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from cases.case import Case
from cases.operand_registry import FURTHER_RESULTS
from impls.contract.declarations import TANGENTS, Arithmetic
from impls.contract.implementation import Implementation
from impls.dot_product.attention import EINSUMS, attention

_OPTIONS = ("further_results", "float32_logits", "float32_qk_product", "compute_axis_order")


def build_implementation(name: str, **options: Any) -> Implementation:
    """Declare dot-product attention with `options` under `name`. Raises `ValueError` for an unknown option."""
    if unknown := sorted(set(options) - set(_OPTIONS)):
        raise ValueError(f"{name}: dot-product attention has no option {', '.join(unknown)}; it has {_OPTIONS}")
    defaults = {key: inspect.signature(attention).parameters[key].default for key in _OPTIONS}
    chosen = defaults | options
    rounds_logits = not (chosen["float32_logits"] or chosen["float32_qk_product"])
    changed = [
        f"{key}={value}" for key, value in options.items() if value != defaults[key] and key != "further_results"
    ]
    return Implementation(
        name=name,
        call=functools.partial(attention, **options),
        description=", ".join(["plain dot-product attention, any backend", *changed]),
        arithmetic=Arithmetic(logits="input" if rounds_logits else "f32", probabilities="input"),
        offers=frozenset(
            {"alibi_slopes", "score_mod", "captures", "logit_scale", "dropout", "indices", "local_window"}
        ),
        dropout_mask="places",
        further_results=frozenset(chosen["further_results"]),
        supports_case=_refuse_large_logits if rounds_logits else None,
        empty_rows="zero",
        behind_mask="any",
        tangents=TANGENTS,
        validates=True,
        variants=_build_axis_variants(options),
    )


def _build_axis_variants(options: dict[str, Any]) -> dict[str, Any]:
    """Build variants of the same attention, with each axis order except the one in `options`."""
    default = inspect.signature(attention).parameters["compute_axis_order"].default
    orders = [order for order in EINSUMS if order != options.get("compute_axis_order", default)]
    return {
        f"axes_{''.join(map(str, order))}": functools.partial(attention, **{**options, "compute_axis_order": order})
        for order in orders
    }


def _refuse_large_logits(case: Case) -> str | None:
    if case.dtype == "f16" and case.distribution == "huge":
        return "logits beyond 65504 overflow when they are rounded to float16"
    return None


IMPLEMENTATIONS: tuple[Implementation, ...] = (build_implementation("dot_product", further_results=FURTHER_RESULTS),)
