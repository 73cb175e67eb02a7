"""ALiBi: logits fall with the distance of query and key, by a slope for each query head (arXiv:2108.12409).

Queries are counted from the end: the last query stands at the last key. Slopes are constants, without a gradient.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from cases.counter_rng import draw_normal
from cases.operand import OptionalOperand, TermRounding
from cases.operand_validation import CallSizes, validate_per_query_head

if TYPE_CHECKING:
    from cases.case import Case
    from cases.operand_values import Problem

# By how much the logit of the furthest key falls, in the first head and in the one past the last.
_FALLS = (6.0, 1.5)


def _draw(case: Case, problem: Problem, spread: float) -> np.ndarray:
    """Draw slopes that fall from head to head and leave the furthest key a visible weight; no powers of two."""
    heads = np.arange(case.num_q_heads) / case.num_q_heads
    falls = _FALLS[0] * (_FALLS[1] / _FALLS[0]) ** heads * 2 ** (draw_normal(case.seed, "alibi", heads.shape) / 8)
    return (falls * max(1.0, spread / 2) / max(case.q_length, case.kv_length)).astype(np.float32)


def _validate(name: str, value: Any, sizes: CallSizes, dtypes: Collection[str]) -> None:
    validate_per_query_head(name, value, sizes, dtypes, one="slope")


def _compute_term(problem: Problem) -> np.ndarray:
    """Return `-slope_n |i + S - T - j|`, `[1, N, T, S]`."""
    assert problem.alibi_slopes is not None
    q_length, kv_length = problem.q.shape[1], problem.k.shape[1]
    distance = np.abs(np.arange(q_length)[:, None] + (kv_length - q_length) - np.arange(kv_length))
    term: np.ndarray = -problem.alibi_slopes.astype(np.float64)[None, :, None, None] * distance
    return term


def _build_null(problem: Problem) -> np.ndarray:
    return np.zeros(problem.q.shape[2], np.float32)


OPERAND = OptionalOperand(
    name="alibi_slopes",
    arrays=(("N",),),
    field="alibi",
    form="alibi",
    levels=(True,),
    description="ALiBi: logits fall with the distance of query and key, by a slope for each query head",
    words="alibi_slopes",
    grid_levels=(True,),
    rich_level=True,
    is_rare=True,
    opt_in=True,
    is_quiet=True,
    is_positional=True,
    vmap="alibi_slopes",
    # Under a causal mask ALiBi is a number for each key, as far as weights go, but for sinks. A window is counted from
    # the first key and distances from the last one: that differs where there are fewer queries.
    calls={
        "sloped": {"mask": "causal", "alibi": True},
        "sloped_sunk": {"mask": "causal", "alibi": True, "sinks": True},
        "sloped_ahead": {"phase": "prefill", "mask": "window-l9-r3", "alibi": True, "kv_length": 72},
    },
    decoding=({"mask": "causal", "alibi": True},),
    draw=_draw,
    validate=_validate,
    null=_build_null,
    term=_compute_term,
    term_rounding=TermRounding(integers=1, products=1),  # the distance, and its product with the slope
)
