"""Assign rotations: at level `quick`, choose the costly questions that checks ask of each case of a grid.

Nearly all of the cost is compilation, and there are many cases. So each case gets only one alternative of each costly
question:

- one of the two calls (with or without residuals) is differentiated, with one of the partial cotangents;
- one of the laws of attention is checked;
- one of NaN and the infinities is put where nothing may read it (`poison`);
- one case in four gets NaN in a key that queries attend to;
- one case in four merges parts: attention over pieces of the cache.

Each alternative is assigned to as many cases as any other: in all, with each level of each axis, and with each
alternative of the other questions, as far as possible (`cases.balanced_assignment`). Cases that share compiled programs
get the same alternative where it has to be compiled: the call that is differentiated, and whether parts are merged.
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
    list_partial_cotangents,
    list_pullbacks,
)
from impls.contract.implementation import Implementation

_QUARTERS = range(4)
"""Four alternatives, of which each case gets one. A quarter of all cases gets the first one: these merge parts, say."""

Alternative = TypeVar("Alternative")


def assign_rotations(implementation: Implementation, grid: Grid, seed: int) -> dict[Case, Rotation]:
    """Return the rotation of each case of the grid by seed; checks ask the plainest case all questions."""
    plainest = grid.singles[:1]
    rows = {
        case: tuple(row[axis] for axis in grid.weighed)
        for case, row in zip(grid.cases, grid.rows, strict=True)
        if case not in plainest
    }
    assigner = _RotationAssigner(rows, seed)
    pullbacks = assigner.assign(PULLBACKS, lambda case: list_pullbacks(implementation, case), share=True)
    merges = assigner.assign(_QUARTERS, lambda case: _QUARTERS if implementation.parts else (), share=True)
    cotangents = assigner.assign(PARTIAL_COTANGENTS, lambda case: list_partial_cotangents(case, pullbacks[case]))
    laws = assigner.assign(LAWS, lambda case: LAWS)
    poisons = assigner.assign(POISONS, lambda case: POISONS if implementation.behind_mask == "any" else ())
    visible = assigner.assign(_QUARTERS, lambda case: _QUARTERS)
    rotations = {
        case: Rotation(
            pullbacks=pullbacks[case],
            cotangents=cotangents[case],
            laws=laws[case],
            poisons=poisons[case],
            visible_nan=visible[case] == (_QUARTERS[0],),
            merges=merges[case] == (_QUARTERS[0],),
        )
        for case in rows
    }
    return {case: rotations.get(case, FULL_ROTATION) for case in grid.cases}


def assign_size_rotations(implementation: Implementation, grid: Grid, seed: int) -> dict[Case, Rotation]:
    """Return the rotation of each case of the grid of sizes.

    One call is differentiated, with a random cotangent, and huge numbers are the only poison. Laws, other poisons and
    visible NaN depend on features more than on sizes, so they are left to the grid of features.
    """
    return {
        case: dataclasses.replace(rotation, cotangents=(), laws=(), poisons=(), visible_nan=False)
        for case, rotation in assign_rotations(implementation, grid, seed).items()
    }


class _RotationAssigner:
    """Assign alternatives of one question after another, balancing those of earlier questions like axes."""

    def __init__(self, rows: dict[Case, Row], seed: int) -> None:
        self._cases = tuple(rows)
        self._levels: list[tuple[int | None, ...]] = [*rows.values()]
        self._seed = seed

    def assign(
        self,
        alternatives: Sequence[Alternative],
        possible: Callable[[Case], Sequence[Alternative]],
        *,
        share: bool = False,
    ) -> dict[Case, tuple[Alternative, ...]]:
        """Assign to each case one of the alternatives that are possible for it, as a tuple; empty if none is possible.

        Args:
          possible: returns the alternatives that are possible for a case.
          share: whether cases that share compiled programs get the same alternative.
        """
        assigned = assign(
            self._levels,
            [
                tuple(n for n, alternative in enumerate(alternatives) if alternative in possible(case))
                for case in self._cases
            ],
            count=len(alternatives),
            together=[case.program for case in self._cases] if share else None,
            first=self._seed,
        )
        self._levels = [(*levels, number) for levels, number in zip(self._levels, assigned, strict=True)]
        return {
            case: () if number is None else (alternatives[number],)
            for case, number in zip(self._cases, assigned, strict=True)
        }
