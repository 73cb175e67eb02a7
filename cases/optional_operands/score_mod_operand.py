"""The operand `score_mod`: a function `(score, b, n, i, j) -> score` that changes each scaled logit.

`cases.score_functions` has the functions that cases use. Each either adds a term to the logit or applies a soft cap.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from cases import score_functions
from cases.case_fields import CallOperands, CaseFields
from cases.operand import OptionalOperand, TermRounding
from cases.operand_validation import CallSizes


def _draw(case: CaseFields, problem: CallOperands, spread: float) -> score_functions.Score:
    """Build the score function of the case; the seed does not change it, so all calls under `vmap` can share it."""
    assert case.score is not None
    sizes = {"num_q_heads": case.num_q_heads, "q_length": case.q_length, "kv_length": case.kv_length}
    return score_functions.build_score(case.score, spread=spread, **sizes)


def _validate(name: str, value: Any, sizes: CallSizes, dtypes: Collection[str]) -> None:
    if not callable(value):
        raise TypeError(f"{name} must be a function (score, b, n, i, j) -> score, got {type(value).__name__}")


def _compute(problem: CallOperands, *, caps: bool) -> np.ndarray | None:
    score = problem.score_mod
    if not isinstance(score, score_functions.FormulaScore) or score.caps != caps:
        return None
    return score.dense(problem.q.shape[0], problem.q.shape[2], problem.places, problem.k.shape[1])


OPERAND = OptionalOperand(
    name="score_mod",
    arrays=(),
    field="score",
    form="score-NAME",
    levels=(*score_functions.LEVELS, *score_functions.CAPTURED),
    description="scaled logits changed by a function of batch row, query head and places",
    words="a score by formula",
    grid_levels=score_functions.LEVELS,
    combined_level=score_functions.LEVELS[0],
    is_rare=True,
    opt_in=True,
    is_absence_ignored=True,
    is_positional=True,
    decoding=({"mask": "causal", "score": "score-rows"},),
    draw=_draw,
    validate=_validate,
    term=lambda problem: _compute(problem, caps=False),
    term_rounding=TermRounding(integers=1),  # the term is a whole number times a power of two
    cap=lambda problem: _compute(problem, caps=True),
)
