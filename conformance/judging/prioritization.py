"""Order the jobs of a run so that those that tell most per second come first.

The level `smoke` is the beginning of that order. A case tells something new by its marks (`cases.case_space.novelty`)
that no earlier case has, and by pairs of them. Nearly all of its cost is compilation, so cases that share compiled
programs stay together and cost little more than one. The next program is the one with most that is new for its cost, as
in greedy set cover (Chvatal, 1979, "A Greedy Heuristic for the Set-Covering Problem"). Costs are constants, not
measurements, so the order is the same on every machine.
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
"""Number of compiled programs of the grid that `smoke` judges: about ten seconds for a plain function."""
SMOKE_CHECKS = ("errors", "refusals", "limits", "differentiation", "front_end", "memory", "program", "aliasing")
"""Checks of cases beside the grid that `smoke` runs: those that compile one or two programs."""

# A new mark is worth so many new pairs. The value is a choice: about half the number of marks of a case.
_PAIRS_PER_MARK = 12
# Costs, in units of a forward program of `dot_product`, which takes 0.09 s on a CPU: of a forward program, of each
# differentiated call, and of a case that shares programs. The last number is how many multiplications of queries with
# keys and values cost one unit. All are rough: they decide the order of jobs, and no verdict.
_FORWARD_COST, _PULLBACK_COST, _SHARED_CASE_COST, _MULTIPLICATIONS_PER_COST = 1.0, 3.5, 0.4, 4e7


def order_jobs(jobs: Sequence[Job]) -> list[Job]:
    """Order the jobs of one implementation: the most telling programs, then long jobs, then all others.

    A long job compiles many programs. Begun last, it would keep one process busy while the others are idle.
    """
    first = _select_first_programs(jobs)
    first_ids = {id(job) for job in first}
    return first + sorted((job for job in jobs if id(job) not in first_ids), key=lambda job: job.short)


def select_smoke_jobs(jobs: Sequence[Job]) -> list[Job]:
    """Select the jobs of `smoke`: the most telling programs of the grid, and `SMOKE_CHECKS`."""
    off_grid = (
        dataclasses.replace(job, checks=tuple(check for check in job.checks if check.name in SMOKE_CHECKS))
        for job in jobs
        if not job.is_on_grid
    )
    return _select_first_programs(jobs) + [job for job in off_grid if job.checks]


def _select_first_programs(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs of the most telling programs."""
    return [job for program in order_programs(jobs)[:SMOKE_PROGRAMS] for job in program]


def order_programs(jobs: Sequence[Job]) -> list[list[Job]]:
    """Group the jobs on the grid by compiled program, and put the most telling program first."""
    on_grid = [job for job in jobs if job.is_on_grid]
    by_program: dict[str, list[int]] = {}
    for place, job in enumerate(on_grid):
        program_without_seed = job.case.program.rpartition("/")[0]
        by_program.setdefault(program_without_seed, []).append(place)
    places = list(by_program.values())
    questions = tuple(tuple((on_grid[place].case, on_grid[place].rotation) for place in program) for program in places)
    return [[on_grid[place] for place in places[number]] for number in _order_greedily(questions)]


Question = tuple[Case, Rotation]
"""A case, and the rotation that says which costly questions it is asked."""


@functools.lru_cache(maxsize=64)
def _order_greedily(programs: tuple[tuple[Question, ...], ...]) -> tuple[int, ...]:
    """Return the numbers of programs in greedy order.

    The result is cached, since kernels that support the same features get the same cases.
    """
    ordered: list[int] = []
    met: set[str] = set()
    met_pairs: set[Pair] = set()
    # The value of a program only falls as others are taken. So a program whose present value exceeds all earlier values
    # of the others is the best (Minoux, 1978, "Accelerated greedy algorithms for maximizing submodular set functions").
    waiting = [(-compute_value(program, met, met_pairs), number) for number, program in enumerate(programs)]
    heapq.heapify(waiting)
    while waiting:
        _, number = heapq.heappop(waiting)
        value = -compute_value(programs[number], met, met_pairs)
        if waiting and value > waiting[0][0]:
            heapq.heappush(waiting, (value, number))
            continue
        for question in programs[number]:
            met |= collect_marks(question)
            met_pairs |= pair_marks(collect_marks(question))
        ordered.append(number)
    return tuple(ordered)


def compute_value(program: Sequence[Question], met: Set[str], met_pairs: Set[Pair]) -> float:
    """Compute what the cases of a program add to `met` and `met_pairs`, divided by their cost."""
    marks_by_case = [collect_marks(question) for question in program]
    new_marks = frozenset[str]().union(*marks_by_case) - met
    new_pairs = frozenset[Pair]().union(*map(pair_marks, marks_by_case)) - met_pairs
    cost = _estimate_cost(*program[0]) + _SHARED_CASE_COST * (len(program) - 1)
    return (_PAIRS_PER_MARK * len(new_marks) + len(new_pairs)) / cost


def collect_marks(question: Question) -> frozenset[str]:
    """Return the marks of the case, with one for each question that its rotation asks."""
    case, turn = question
    pulled_back = itertools.chain(turn.pullbacks, turn.cotangents) if case.phase == "train" else ()
    return find_marks(case) | {f"asks {what}" for what in itertools.chain(pulled_back, turn.laws, turn.poisons)}


def _estimate_cost(case: Case, turn: Rotation) -> float:
    """Estimate the cost of a case, in units of one forward program of `dot_product`."""
    multiplications = case.batch * case.num_q_heads * case.q_length * case.kv_length * (case.head_dim + case.v_head_dim)
    calls = len(turn.pullbacks) if case.phase == "train" else 0
    return _FORWARD_COST + _PULLBACK_COST * calls + multiplications * (1 + 3 * bool(calls)) / _MULTIPLICATIONS_PER_COST
