"""Choose which of the rotating questions a case is asked.

Some questions cost compilation. At `quick` they rotate over the cases of the grid: each case is asked some of them.
`conformance.judging.rotation_assignment` assigns them.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from cases.case import Case
from conformance.contract import Implementation

Pullback = Literal["plain", "residuals"]
"""Which of the two calls is differentiated: the plain one, or the one with residuals."""
PartialCotangent = Literal["row", "head", "lse"]
"""A cotangent that reaches one row, one head, or `logsumexp` alone."""
Law = Literal["independence", "linearity"]
"""A check that compares two results of the implementation, without the oracle."""
Poison = Literal["nan", "inf"]
"""The non-finite value that is put behind the mask."""

PULLBACKS: tuple[Pullback, ...] = get_args(Pullback)
PARTIAL_COTANGENTS: tuple[PartialCotangent, ...] = get_args(PartialCotangent)
LAWS: tuple[Law, ...] = get_args(Law)
POISONS: tuple[Poison, ...] = get_args(Poison)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotation:
    """The rotating questions that one case is asked; by default all of them.

    Attributes:
      pullbacks: the calls that are differentiated.
      cotangents: the partial cotangents that are pulled back, among those of `list_partial_cotangents`.
      laws: the laws that are checked.
      poisons: the non-finite values that are put behind the mask; huge numbers always are.
      merges: whether parts over pieces of the cache are merged.
    """

    pullbacks: tuple[Pullback, ...] = PULLBACKS
    cotangents: tuple[PartialCotangent, ...] = PARTIAL_COTANGENTS
    laws: tuple[Law, ...] = LAWS
    poisons: tuple[Poison, ...] = POISONS
    merges: bool = True


FULL_ROTATION = Rotation()


def list_pullbacks(implementation: Implementation, case: Case) -> tuple[Pullback, ...]:
    """List the calls that can be differentiated; only the plain one if `logsumexp` carries no gradient."""
    if case.phase != "train" or not implementation.gradients:
        return ()
    return PULLBACKS if "logsumexp" in implementation.differentiable_residuals else ("plain",)


def list_partial_cotangents(case: Case, pullbacks: tuple[Pullback, ...]) -> tuple[PartialCotangent, ...]:
    """List the partial cotangents of a case, given the calls that are differentiated.

    A cotangent on the only row or head reaches the whole result, so it is not listed. Only the call with residuals
    returns `logsumexp`.
    """
    exists: dict[PartialCotangent, bool] = {
        "row": bool(pullbacks) and case.q_length > 1,
        "head": bool(pullbacks) and case.num_q_heads > 1,
        "lse": "residuals" in pullbacks,
    }
    return tuple(part for part in PARTIAL_COTANGENTS if exists[part])
