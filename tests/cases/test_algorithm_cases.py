"""The cases of `algorithm` have every property of a case between them, and a scale that no dtype rounds."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from cases.algorithm_cases import select_algorithm_cases
from cases.case import Case
from cases.case_space.coarse_levels import find_coarse_levels
from cases.grid import build_grid

_PLAIN = Case(q_length=128, kv_length=128)
_GRID = build_grid("quick", 0, lambda case: None).cases


def test_a_few_cases_have_every_property_in_training_and_apart_from_it() -> None:
    chosen = select_algorithm_cases(_GRID, [_PLAIN])
    every = select_algorithm_cases(_GRID, [_PLAIN], every_program=True)
    for trains, dtype in itertools.product((True, False), ("bf16", "f16")):
        levels = [
            frozenset().union(
                *(find_coarse_levels(case) for case in cases if (case.phase == "train", case.dtype) == (trains, dtype))
            )
            for cases in (chosen, every)
        ]
        assert levels[0] == levels[1]
    assert set(chosen) <= set(every)
    assert len(chosen) < len(every)


@pytest.mark.parametrize("every_program", [False, True])
def test_no_case_has_a_scale_that_a_dtype_rounds(every_program: bool) -> None:
    chosen = select_algorithm_cases(_GRID, [_PLAIN], every_program=every_program)
    assert {math.frexp(case.scale or case.head_dim**-0.5)[0] for case in chosen} == {0.5}
    assert len({case.program for case in chosen}) == len(chosen)


def test_the_plainest_case_comes_first_in_a_dtype_that_is_supported() -> None:
    def supports(case: Case) -> str | None:
        return "no bf16" if case.dtype == "bf16" else None

    chosen = select_algorithm_cases(_GRID, [_PLAIN], supports)
    assert chosen[0] == dataclasses.replace(_PLAIN, dtype="f16")
    assert chosen[-1] == _PLAIN
    assert {case.dtype for case in chosen[:-1]} == {"f16"}
