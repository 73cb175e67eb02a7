"""Who is asked what: at `quick` the cases of a grid take turns with the questions that cost most.

Compiling is nearly all of the cost, and there are many cases. Hence each case has one of the two calls differentiated
with one of the partial cotangents, is asked one of the laws, and gets one of the poisons that are no numbers; one in
four merges parts over pieces of the cache. Each alternative falls to as many cases as any other, in all and with each
level of each axis and each alternative of the other questions, as far as that goes (`cases.balanced_assignment`). Cases that share
compiled programs share what has to be compiled: which call is differentiated, and whether parts are merged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

from cases.balanced_assignment import assign
from cases.case import Case
from cases.covering_array import Row
from cases.grid import Grid
from conformance.check_api.rotation import (
    FULL_ROTATION,
    LAWS,
    PARTIAL_COTANGENTS,
    POISONS,
    PULLBACKS,
    Rotation,
    list_parts,
    list_pullbacks,
)
from conformance.contract import Implementation

_QUARTERS = range(4)
"""What is asked of one case in four is asked of the first quarter."""

Alternative = TypeVar("Alternative")


def assign_rotations(implementation: Implementation, found: Grid, seed: int) -> dict[Case, Rotation]:
    """The turn of each case of the grid: the plainest is asked everything. With another seed, other turns are taken."""
    plainest = found.singles[:1]
    rows = {
        case: tuple(row[axis] for axis in found.weighed)
        for case, row in zip(found.cases, found.rows, strict=True)
        if case not in plainest
    }
    choices = _RotationAssigner(rows, seed)
    pulled = choices.of(PULLBACKS, lambda case: list_pullbacks(implementation, case), share=True)
    merges = choices.of(_QUARTERS, lambda case: _QUARTERS if implementation.parts else (), share=True)
    cotangents = choices.of(PARTIAL_COTANGENTS, lambda case: list_parts(case, pulled[case]))
    laws = choices.of(LAWS, lambda case: LAWS)
    poisons = choices.of(POISONS, lambda case: POISONS if implementation.behind_mask == "any" else ())
    turned = {
        case: Rotation(
            pulled=pulled[case],
            cotangents=cotangents[case],
            laws=laws[case],
            poisons=poisons[case],
            merges=merges[case] == (_QUARTERS[0],),
        )
        for case in rows
    }
    return {case: turned.get(case, FULL_ROTATION) for case in found.cases}


def assign_size_rotations(implementation: Implementation, found: Grid, seed: int) -> dict[Case, Rotation]:
    """The turn of each case of the grid of sizes: one of the two calls, a random cotangent, and huge numbers.

    Laws and poisons go by features more than by sizes, and have the other grid.
    """
    return {
        case: dataclasses.replace(turn, cotangents=(), laws=(), poisons=())
        for case, turn in assign_rotations(implementation, found, seed).items()
    }


class _RotationAssigner:
    """Cases that choose one thing after another; what they have chosen counts as an axis from then on."""

    def __init__(self, rows: dict[Case, Row], seed: int) -> None:
        self._cases = tuple(rows)
        self._levels: list[tuple[int | None, ...]] = [*rows.values()]
        self._seed = seed

    def of(
        self,
        alternatives: Sequence[Alternative],
        possible: Callable[[Case], Sequence[Alternative]],
        *,
        share: bool = False,
    ) -> dict[Case, tuple[Alternative, ...]]:
        """The one alternative that falls to each case, of those that are possible for it; none if none is.

        With `share`, cases that share compiled programs share it.
        """
        given = assign(
            self._levels,
            [tuple(n for n, what in enumerate(alternatives) if what in possible(case)) for case in self._cases],
            count=len(alternatives),
            together=[case.program for case in self._cases] if share else None,
            first=self._seed,
        )
        self._levels = [(*levels, place) for levels, place in zip(self._levels, given, strict=True)]
        return {
            case: () if place is None else (alternatives[place],)
            for case, place in zip(self._cases, given, strict=True)
        }
