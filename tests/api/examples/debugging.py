"""Debug a function with the operands, exact results and bounds of one case."""

from __future__ import annotations

import jax
import numpy as np

import conformance


def attention(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool = False) -> jax.Array:
    """Compute attention by JAX's own function."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal)


def compare() -> str:
    """Compare `out` with its exact values, by hand and by the judge's limits."""
    case: conformance.CaseData = conformance.case("train/f32/B1.T128.S128.N2.K2.H64.V64/causal/normal/s0")
    out = np.asarray(attention(**case.arguments(attention)))  # [B, T, N, V]
    ratios = np.abs(out - case.expected["out"]) / case.bounds["out"]
    assert ratios.max() < 4
    compared = case.compare({"out": out})
    assert compared.passes
    assert case.compare(case.run(attention)).passes  # the gradients too
    return str(compared["out"])


def list_cases() -> tuple[str, ...]:
    """List the cases in bf16 on which the function would be judged."""
    return tuple(conformance.cases("train/bf16", function=attention, level="quick"))
