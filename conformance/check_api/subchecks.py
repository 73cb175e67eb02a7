"""Define which costly subchecks run on one case.

Some subchecks need programs of their own to be compiled, for example the gradients for another cotangent. At the level
`quick` each case of the grid gets only some of them. `conformance.judging.subcheck_assignment` assigns them.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from cases.case import Case
from impls.contract.implementation import Implementation

Pullback = Literal["plain", "residuals"]
"""The call that is differentiated: the one that returns only `out`, or the one that also returns the residuals."""
PartialCotangent = Literal["row", "head", "lse"]
"""A cotangent that is nonzero only in one row of `out`, in one head of `out`, or in `logsumexp`."""
Law = Literal["independence", "linearity"]
"""A check that compares results of the implementation with each other, without the oracle."""
Poison = Literal["nan", "inf"]
"""The non-finite value that the check `poison` puts into keys and values that the mask hides."""

PULLBACKS: tuple[Pullback, ...] = get_args(Pullback)
PARTIAL_COTANGENTS: tuple[PartialCotangent, ...] = get_args(PartialCotangent)
LAWS: tuple[Law, ...] = get_args(Law)
POISONS: tuple[Poison, ...] = get_args(Poison)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subchecks:
    """The costly subchecks that run on one case; by default all of them.

    Attributes:
      pullbacks: the calls that are differentiated.
      cotangents: the partial cotangents that are pulled back, if the case has them (`list_partial_cotangents`).
      laws: the law checks that run.
      poisons: the non-finite values that the check `poison` uses. It always uses huge numbers too.
      visible_nan: whether NaN is put into a key that queries attend to.
      merges: whether partial results over pieces of the cache are merged and compared.
    """

    pullbacks: tuple[Pullback, ...] = PULLBACKS
    cotangents: tuple[PartialCotangent, ...] = PARTIAL_COTANGENTS
    laws: tuple[Law, ...] = LAWS
    poisons: tuple[Poison, ...] = POISONS
    visible_nan: bool = True
    merges: bool = True


ALL_SUBCHECKS = Subchecks()


def list_pullbacks(implementation: Implementation, case: Case) -> tuple[Pullback, ...]:
    """List the calls that can be differentiated; without the call with residuals if `logsumexp` carries no gradient."""
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
