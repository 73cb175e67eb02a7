"""The operand `sinks`: one learned logit for each query head, which joins the denominator of the softmax.

A sink is neither scaled nor capped nor masked. It belongs to no key, so it is neither a term nor a factor of the logits
here. The oracle adds it to the softmax (`conformance.truth.oracle.HeadGroup.sinks`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any

import numpy as np

from cases.case_fields import CallOperands, CaseFields
from cases.counter_rng import draw_normal
from cases.distributions import compute_huge_coordinates, compute_low_coordinates
from cases.operand import OptionalOperand
from cases.operand_validation import CallSizes, validate_per_query_head
from cases.score_functions import CAPPING

EXTREME = "sinksedge"
"""The level of cases some of whose sinks are as large or as low as f32 allows."""
# The first head has the largest sink, which takes all the weight. The second has an ordinary one. The next have sinks
# that take none: minus infinity, and the finite number that models use in its place.
_EDGES = (float(np.finfo(np.float32).max), None, -np.inf, -1e30)


def _draw(case: CaseFields, problem: CallOperands, spread: float) -> np.ndarray:
    """Draw sinks `[N]` near the typical logsumexp over the keys, so that a sink takes a visible part of the weight."""
    allowed = problem.allowed
    rows = max(1, int(allowed.any(axis=-1).sum()))
    keys = math.log(max(1.0, int(allowed.sum()) / rows))
    typical = keys + spread**2 / 2 if spread < math.sqrt(2 * keys) else spread * math.sqrt(2 * keys)
    if case.score in CAPPING:
        typical = min(typical, max(2.0, spread))  # about where the capping score function bends
    if case.soft_cap is not None:
        # Under a cap below log(number of keys), many keys have similar weights. Under a higher cap, few keys dominate.
        many = case.soft_cap < keys
        typical = keys + case.soft_cap / 2 if many else case.soft_cap * math.tanh(typical / case.soft_cap)
    if case.distribution == "huge":
        typical += problem.effective_scale * math.prod(compute_huge_coordinates(problem.effective_scale))
    rounded = round(typical * 16) / 16
    sinks = rounded + draw_normal(case.seed, "sinks", (case.num_q_heads,))
    if case.distribution == "low":
        # The scale is drawn after the sinks, so the problem does not have it yet.
        scale = dataclasses.replace(problem, scale=case.scale).effective_scale
        key, queries = compute_low_coordinates(case.num_q_heads, scale)
        sinks += scale * key * queries
    if case.sinks == EXTREME:
        # The last head always has an ordinary sink, so that no sink of a case with one head is extreme.
        for head in range(case.num_q_heads - 1):
            edge = _EDGES[head % len(_EDGES)]
            sinks[head] = sinks[head] if edge is None else edge
    return sinks.astype(np.float32)


def _validate(name: str, value: Any, sizes: CallSizes, dtypes: Collection[str]) -> None:
    validate_per_query_head(name, value, sizes, dtypes, one="logit")


def _build_null(problem: CallOperands) -> np.ndarray:
    """Build sinks of minus infinity, which take no weight."""
    return np.full(problem.q.shape[2], -np.inf, np.float32)


OPERAND = OptionalOperand(
    name="sinks",
    arrays=(("N",),),
    gradient="dsinks",
    field="sinks",
    form="sinks",
    levels=(True, EXTREME),
    description="one learned sink logit for each query head",
    words="sinks",
    traits={"sinksedge": ("sinks as large or as low as f32 allows",)},
    grid_levels=(True, EXTREME),
    combined_level=True,
    special=0.0,
    stored=True,
    vmap="sinks",
    draw=_draw,
    validate=_validate,
    null=_build_null,
)
