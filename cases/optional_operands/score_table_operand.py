"""The operand `score_table`: the array that a score function captures (`cases.score_functions.TableScore`).

A case asks for it by the name of its score function. A call gets it inside `score_mod`, as a leaf.
"""

from __future__ import annotations

import numpy as np

from cases.case_fields import CallOperands, CaseFields
from cases.counter_rng import draw_normal
from cases.operand import LogitOperand, TermRounding
from cases.score_functions import TableScore


def draw_score_table(case: CaseFields, problem: CallOperands) -> np.ndarray | None:
    """Draw the table `[L, N]` of the problem's score function; None if the function captures none."""
    score = problem.score_mod
    if not isinstance(score, TableScore):
        return None
    return score.draw_table(draw_normal(case.seed, "score_table", (score.num_entries, case.num_q_heads)))


def _compute(problem: CallOperands, *, caps: bool) -> np.ndarray | None:
    score, table = problem.score_mod, problem.score_table
    assert isinstance(score, TableScore)
    assert table is not None
    if score.caps != caps:
        return None
    found = score.dense_table(table, problem.q.shape[1], problem.k.shape[1])
    return np.broadcast_to(found, (problem.q.shape[0], *found.shape[1:])) if caps else found


OPERAND = LogitOperand(
    name="score_table",
    arrays=(("L", "N"),),
    gradient="dscore_table",
    vmap="score_table",
    term=lambda problem: _compute(problem, caps=False),
    term_rounding=TermRounding(integers=2, products=1),  # a whole number times an entry, both exact in f32
    cap=lambda problem: _compute(problem, caps=True),
)
