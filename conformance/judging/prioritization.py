"""The order of jobs: what says most a second comes first, and `smoke` is where that order begins.

A case says something new by the marks that no case before it had (`cases.case_space.novelty`), and by pairs of them.
What it costs is compiling, nearly all of it: cases that share compiled programs stay together and cost little more than
one. The next program is the one with most that is new for its cost, as in greedy set cover (Chvatal, 1979, "A Greedy
Heuristic for the Set-Covering Problem"). Neither the clock nor the machine decides, so that an order is the same
everywhere.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Sequence, Set

from cases.case import Case
from cases.case_space.novelty import Pair, find_marks, pair_marks
from conformance.check_api.rotation import Rotation
from conformance.judging.job import Job

SMOKE_PROGRAMS = 36
"""Compiled programs of the grid that `smoke` judges: about as many as a plain function takes ten seconds for."""
SMOKE_CHECKS = ("errors", "refusals", "limits", "differentiation", "front_end", "memory", "program", "aliasing")
"""Checks beside the grid that `smoke` asks: those of one program or two."""

# A mark that no case had is worth so many pairs: a choice, about half as many as there are marks in a case.
_PAIRS_PER_MARK = 12
# The cost of a program that is run forward, of each call that is differentiated beside it, of a case that shares
# programs, and the multiplications of queries with keys and values that cost as much as the first. In units of a
# forward program of `dot_product`, 0.09 s on a CPU, and rough: only the order hangs on them, and no verdict.
_FORWARD_COST, _PULLBACK_COST, _SHARED_CASE_COST, _MULTIPLICATIONS_PER_COST = 1.0, 3.5, 0.4, 4e7


def order_jobs(jobs: Sequence[Job]) -> list[Job]:
    """The jobs of one implementation: those of the foremost programs, then the long ones, then all others.

    Long jobs are many programs each: begun last, they would leave one process at work and the others idle.
    """
    first = _select_first_programs(jobs)
    chosen = {id(job) for job in first}
    return first + sorted((job for job in jobs if id(job) not in chosen), key=lambda job: job.short)


def select_smoke_jobs(jobs: Sequence[Job]) -> list[Job]:
    """The jobs of `smoke`: those of the foremost programs, and what `SMOKE_CHECKS` ask beside the grid."""
    beside = (
        dataclasses.replace(job, checks=tuple(check for check in job.checks if check.name in SMOKE_CHECKS))
        for job in jobs
        if not job.is_on_grid
    )
    return _select_first_programs(jobs) + [job for job in beside if job.checks]


def _select_first_programs(jobs: Sequence[Job]) -> list[Job]:
    return [job for program in order_programs(jobs)[:SMOKE_PROGRAMS] for job in program]


def order_programs(jobs: Sequence[Job]) -> list[list[Job]]:
    """The jobs on the grid by compiled program, the program first that says most that is new for its cost."""
    on_grid = [job for job in jobs if job.is_on_grid]
    by_program: dict[str, list[int]] = {}
    for place, job in enumerate(on_grid):
        but_for_the_seed = job.case.program.rpartition("/")[0]
        by_program.setdefault(but_for_the_seed, []).append(place)
    places = list(by_program.values())
    asked = tuple(tuple((on_grid[place].case, on_grid[place].rotation) for place in program) for program in places)
    return [[on_grid[place] for place in places[number]] for number in _order_greedily(asked)]


Question = tuple[Case, Rotation]
"""A case, and what it is asked."""


@functools.lru_cache(maxsize=64)
def _order_greedily(programs: tuple[tuple[Question, ...], ...]) -> tuple[int, ...]:
    """The programs, by number, in their order. Kept, since kernels that support the same are asked the same."""
    found: list[int] = []
    met: set[str] = set()
    met_pairs: set[Pair] = set()
    # What a program is worth only falls as others are taken: one that stays ahead of what the rest was once worth is
    # ahead of the rest (Minoux, 1978, "Accelerated greedy algorithms for maximizing submodular set functions").
    waiting = [(-compute_value(program, met, met_pairs), number) for number, program in enumerate(programs)]
    heapq.heapify(waiting)
    while waiting:
        _, number = heapq.heappop(waiting)
        now = -compute_value(programs[number], met, met_pairs)
        if waiting and now > waiting[0][0]:
            heapq.heappush(waiting, (now, number))
            continue
        for question in programs[number]:
            met |= collect_marks(question)
            met_pairs |= pair_marks(collect_marks(question))
        found.append(number)
    return tuple(found)


def compute_value(program: Sequence[Question], met: Set[str], met_pairs: Set[Pair]) -> float:
    """What the cases of a program have that is neither in `met` nor in `met_pairs`, for what they cost."""
    found = [collect_marks(question) for question in program]
    new = frozenset[str]().union(*found) - met
    new_pairs = frozenset[Pair]().union(*map(pair_marks, found)) - met_pairs
    cost = _estimate_cost(*program[0]) + _SHARED_CASE_COST * (len(program) - 1)
    return (_PAIRS_PER_MARK * len(new) + len(new_pairs)) / cost


def collect_marks(question: Question) -> frozenset[str]:
    """The marks of the case, and what it is asked."""
    case, turn = question
    asked = itertools.chain(turn.pulled, turn.cotangents) if case.phase == "train" else ()
    return find_marks(case) | {f"asks {what}" for what in itertools.chain(asked, turn.laws, turn.poisons)}


def _estimate_cost(case: Case, turn: Rotation) -> float:
    run = case.batch * case.num_q_heads * case.q_length * case.kv_length * (case.head_dim + case.v_head_dim)
    calls = len(turn.pulled) if case.phase == "train" else 0
    return _FORWARD_COST + _PULLBACK_COST * calls + run * (1 + 3 * bool(calls)) / _MULTIPLICATIONS_PER_COST
