"""The operand `alibi_slopes`: logits fall with the distance of query and key, by one slope per query head.

This is ALiBi (arXiv:2108.12409). Positions are aligned at the end: the last query stands at the last key. Slopes are
constants and have no gradient.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from cases.case_fields import CallOperands, CaseFields
from cases.counter_rng import draw_normal
from cases.operand import OptionalOperand, TermRounding
from cases.operand_validation import CallSizes, validate_per_query_head

# By how much ALiBi lowers the logit of the furthest key: in head 0, and by extrapolation in head N (one past the last).
_FALLS = (6.0, 1.5)


def _draw(case: CaseFields, problem: CallOperands, spread: float) -> np.ndarray:
    """Draw slopes `[N]` that fall from head to head and leave the furthest key a visible weight.

    No slope is a power of two, so that its product with a distance rounds.
    """
    heads = np.arange(case.num_q_heads) / case.num_q_heads
    falls = _FALLS[0] * (_FALLS[1] / _FALLS[0]) ** heads * 2 ** (draw_normal(case.seed, "alibi", heads.shape) / 8)
    return (falls * max(1.0, spread / 2) / max(case.q_length, case.kv_length)).astype(np.float32)


def _validate(name: str, value: Any, sizes: CallSizes, dtypes: Collection[str]) -> None:
    validate_per_query_head(name, value, sizes, dtypes, one="slope")


def _compute_term(problem: CallOperands) -> np.ndarray:
    """Compute the term `-slope_n |p_i - j|` that ALiBi adds to the logits, `[B or 1, N, T, S]`.

    `p_i` is the position of query `i`: `i + S - T`, or where operands are stored, that in its sequence.
    """
    assert problem.alibi_slopes is not None
    q_length, kv_length = problem.q.shape[1], problem.k.shape[1]
    positions = problem.places + (0 if problem.storage is not None else kv_length - q_length)
    distance = np.abs(positions[:, None, :, None] - np.arange(kv_length))
    term: np.ndarray = -problem.alibi_slopes.astype(np.float64)[None, :, None, None] * distance
    return term


def _build_null(problem: CallOperands) -> np.ndarray:
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
    combined_level=True,
    special=0.0,
    is_rare=True,
    opt_in=True,
    is_absence_ignored=True,
    is_positional=True,
    vmap="alibi_slopes",
    # Under a causal mask, ALiBi's term is a number for each key plus one for each query. The latter cancels in the
    # softmax, except against a sink: hence a case with sinks. A window counts positions from the first key, but ALiBi
    # counts them from the last key. The two differ if T < S: hence a case with fewer queries than keys.
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
    term_rounding=TermRounding(integers=1, products=1),  # the distance is an integer, its product with the slope rounds
)
