"""Choose the cases of the check `algorithm`, which evaluates a kernel in float64.

The kernel's code depends on dtype, sizes, mask and operands, and not on values. So one case for each compiled program
is enough. At `quick`, a few programs have every coarse level between them: in each 16-bit dtype, once in training and
once apart from it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from cases.case import Case
from cases.case_space.coarse_levels import find_coarse_levels

# Cases with more pairs of a query and a key, over all heads and batch rows, take seconds in float64.
_MAX_PAIRS = 2**19
# The number of pairs that cost as much as compiling: a rough figure that decides the choice of cases, and no verdict.
_PAIRS_PER_PROGRAM = 2**18


def select_algorithm_cases(
    gridded: Sequence[Case],
    plainest: Sequence[Case],
    supports: Callable[[Case], str | None] = lambda case: None,
    *,
    every_program: bool = False,
) -> tuple[Case, ...]:
    """Select cases of 16-bit operands, the plainest first, and the plainest case of f32.

    Args:
      gridded: the cases of the grids, of which one is taken for a program.
      plainest: the plainest cases, the first of which is judged in bf16 or f16, and in f32.
      supports: returns why a case is unsupported, or None.
      every_program: whether each program of `gridded` gets a case, or a few that have every coarse level between them.
    """
    plain = plainest[:1]
    narrow = (dataclasses.replace(case, dtype=dtype) for case in plain for dtype in ("bf16", "f16"))
    first = [case for case in narrow if supports(case) is None][:1]
    normal = (dataclasses.replace(case, distribution="normal") for case in gridded if case.dtype != "f32")
    others = [case for case in dict.fromkeys(normal) if _is_exact(case) and supports(case) is None]
    chosen = others if every_program else _choose_covering(others, first)
    return tuple(dict.fromkeys((*first, *chosen, *plain)))


def _is_exact(case: Case) -> bool:
    """Return whether the scale is a power of two, which no dtype rounds, and the case is small."""
    scale = 1 / math.sqrt(case.head_dim) if case.scale is None else case.scale
    return math.frexp(scale)[0] == 0.5 and _count_pairs(case) <= _MAX_PAIRS


def _choose_covering(cases: Sequence[Case], first: Sequence[Case]) -> list[Case]:
    """Choose cases with every coarse level, in each dtype, in training and not, by greedy set cover; training first."""
    missing = _find_levels(cases) - _find_levels(first)
    chosen: list[Case] = []
    while missing:
        chosen.append(max(cases, key=lambda case: len(_find_levels([case]) & missing) / _estimate_cost(case)))
        missing -= _find_levels(chosen[-1:])
    return sorted(chosen, key=lambda case: case.phase != "train")


def _estimate_cost(case: Case) -> float:
    """Estimate the cost of a case, in units of compiling its program."""
    return 1 + _count_pairs(case) / _PAIRS_PER_PROGRAM


def _find_levels(cases: Sequence[Case]) -> frozenset[tuple[bool, str, str]]:
    return frozenset((case.phase == "train", case.dtype, level) for case in cases for level in find_coarse_levels(case))


def _count_pairs(case: Case) -> int:
    return case.batch * case.num_q_heads * case.q_length * case.kv_length
