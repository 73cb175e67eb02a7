"""Declare attention over a quantised cache as implementations to judge: with scaled products, or dequantised first."""

from __future__ import annotations

import functools

from cases.case import KV_FEATURES, Case
from impls.contract.declarations import Arithmetic
from impls.contract.implementation import Implementation
from impls.quantized_kv.attention import attention


def _refuse_plain_kv(case: Case) -> str | None:
    if case.phase == "train":
        return "train: a cache is read, not differentiated"
    return None if case.kv_cache else f"{case.phase}: only from a quantised cache"


def _build_implementation(name: str, description: str, *, dequantize: bool) -> Implementation:
    return Implementation(
        name=name,
        call=functools.partial(attention, dequantize=dequantize),
        description=description,
        offers=KV_FEATURES,
        supports_case=_refuse_plain_kv,
        arithmetic=Arithmetic(cache="input" if dequantize else "f32", probabilities="input" if dequantize else "f32"),
        gradients=frozenset(),
        differentiable_residuals=frozenset(),
        empty_rows="zero",
        behind_mask="any",
        validates=True,
    )


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    _build_implementation(
        "quantized_kv",
        "dot-product attention over an int8, int4 or fp8 cache, by products that are scaled, any backend",
        dequantize=False,
    ),
    _build_implementation(
        "quantized_kv_dequantized",
        "dot-product attention over an int8, int4 or fp8 cache that is dequantised first, any backend",
        dequantize=True,
    ),
)
