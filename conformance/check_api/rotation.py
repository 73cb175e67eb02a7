"""What a case is asked of the questions that cases take turns with."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from cases.case import Case
from conformance.contract import Implementation

Pullback = Literal["plain", "residuals"]
"""Which of the two calls is differentiated."""
PartialCotangent = Literal["row", "head", "lse"]
"""A cotangent that reaches only part of what a call returns: one row, one head, `logsumexp` alone."""
Law = Literal["independence", "linearity"]
"""A check that compares answers with each other."""
Poison = Literal["nan", "inf"]
"""What stands behind the mask and is no number."""

PULLBACKS: tuple[Pullback, ...] = get_args(Pullback)
PARTIAL_COTANGENTS: tuple[PartialCotangent, ...] = get_args(PartialCotangent)
LAWS: tuple[Law, ...] = get_args(Law)
POISONS: tuple[Poison, ...] = get_args(Poison)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotation:
    """What is asked of a case: everything, unless a field says less.

    Attributes:
      pulled: the calls that are differentiated.
      cotangents: the partial cotangents that are pulled back, of those that there are (`parts_of`).
      laws: the laws that are asked.
      poisons: what is put behind the mask, beside huge numbers.
      merges: whether parts over pieces of the cache are merged.
    """

    pulled: tuple[Pullback, ...] = PULLBACKS
    cotangents: tuple[PartialCotangent, ...] = PARTIAL_COTANGENTS
    laws: tuple[Law, ...] = LAWS
    poisons: tuple[Poison, ...] = POISONS
    merges: bool = True


FULL_ROTATION = Rotation()


def list_pullbacks(implementation: Implementation, case: Case) -> tuple[Pullback, ...]:
    """The calls that can be differentiated: the plain one alone if `logsumexp` carries no gradient."""
    if case.phase != "train" or not implementation.gradients:
        return ()
    return PULLBACKS if "logsumexp" in implementation.differentiable_residuals else ("plain",)


def list_parts(case: Case, pulled: tuple[Pullback, ...]) -> tuple[PartialCotangent, ...]:
    """The partial cotangents that there are if the calls `pulled` are differentiated.

    A row or a head that is the only one is no part, and `logsumexp` comes out of the call with residuals alone.
    """
    there: dict[PartialCotangent, bool] = {
        "row": bool(pulled) and case.q_length > 1,
        "head": bool(pulled) and case.num_q_heads > 1,
        "lse": "residuals" in pulled,
    }
    return tuple(part for part in PARTIAL_COTANGENTS if there[part])
