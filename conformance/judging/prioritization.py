"""Order the jobs of a run so that jobs that test the most new properties per second come first.

The level `smoke` is the beginning of this order. The calls of a user's first minute come after a few programs of the
grid, at every level. A case has *marks* (`cases.case_space.novelty`): properties such as
mask, dtype and size. The value of a case is the number of marks, and pairs of marks, that no earlier case has. Nearly
all of the cost of a case is compilation. So cases that share compiled programs stay together, and cost little more than
one case. The next program is always the one with the highest value per cost, as in greedy set cover (Chvatal, 1979, "A
Greedy Heuristic for the Set-Covering Problem"). Costs are constants, not measurements, so the order is the same on
every machine.
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
from conformance.check_api.scopes import FIRST
from conformance.judging.job import Job

SMOKE_PROGRAMS = 36
"""Number of compiled programs of the grid that `smoke` judges; docs/cases.md says how long each level takes."""
SMOKE_CHECKS = (
    "first_calls",
    "errors",
    "refusals",
    "limits",
    "differentiation",
    "front_end",
    "memory",
    "program",
    "aliasing",
)
"""Checks with cases of their own, outside the grid, that `smoke` runs: they compile one or two programs each."""

# The number of programs of the grid that are judged before the calls of a user's first minute. A kernel that is plainly
# wrong is red by one of these programs, which takes less time than those calls.
_PROGRAMS_BEFORE_FIRST_CALLS = 4
# The number of new pairs of marks that one new mark is worth. This is a choice: about half a case's number of marks.
_PAIRS_PER_MARK = 12
# Estimated costs. The unit is one forward program of `dot_product`, which takes 0.09 s on a CPU. The first three are
# the costs of a forward program, of each differentiated call, and of a case that shares programs. The last is the
# number of multiplications of queries with keys and values that costs one unit. All are rough: they decide the order of
# jobs, but no verdict.
_FORWARD_COST, _PULLBACK_COST, _SHARED_CASE_COST, _MULTIPLICATIONS_PER_COST = 1.0, 3.5, 0.4, 4e7


def order_jobs(jobs: Sequence[Job]) -> list[Job]:
    """Order an implementation's jobs: first those of `smoke`, then long ones, which would keep others waiting."""
    first = _select_first_jobs(jobs)
    first_ids = {id(job) for job in first}
    return first + sorted((job for job in jobs if id(job) not in first_ids), key=lambda job: job.short)


def select_smoke_jobs(jobs: Sequence[Job]) -> list[Job]:
    """Select the jobs of `smoke`: those that every level begins with, and the `SMOKE_CHECKS`."""
    first = _select_first_jobs(jobs)
    first_ids = {id(job) for job in first}
    off_grid = (
        dataclasses.replace(job, checks=tuple(check for check in job.checks if check.name in SMOKE_CHECKS))
        for job in jobs
        if not job.is_on_grid and id(job) not in first_ids
    )
    return first + [job for job in off_grid if job.checks]


def _select_first_jobs(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs that every level begins with, in their order.

    They are the jobs of the `SMOKE_PROGRAMS` most valuable programs of the grid. Among these, after the first few
    programs, come the calls of a user's first minute.
    """
    programs = [list(program) for program in order_programs(jobs)[:SMOKE_PROGRAMS]]
    first_calls = [job for job in jobs if {check.scope for check in job.checks} == {FIRST}]
    programs.insert(_PROGRAMS_BEFORE_FIRST_CALLS, first_calls)
    return [job for program in programs for job in program]


def order_programs(jobs: Sequence[Job]) -> list[list[Job]]:
    """Group the jobs on the grid by compiled program, and order the groups, the most valuable program first."""
    on_grid = [job for job in jobs if job.is_on_grid]
    by_program: dict[str, list[int]] = {}
    for place, job in enumerate(on_grid):
        program_without_seed = job.case.program.rpartition("/")[0]
        by_program.setdefault(program_without_seed, []).append(place)
    places = list(by_program.values())
    questions = tuple(tuple((on_grid[place].case, on_grid[place].rotation) for place in program) for program in places)
    return [[on_grid[place] for place in places[number]] for number in _order_greedily(questions)]


Question = tuple[Case, Rotation]
"""A case, and the rotation that names the costly questions that checks ask of the case."""


@functools.lru_cache(maxsize=64)
def _order_greedily(programs: tuple[tuple[Question, ...], ...]) -> tuple[int, ...]:
    """Return programs' indices in the order of greedy set cover, cached, since many kernels get equal cases."""
    ordered: list[int] = []
    met: set[str] = set()
    met_pairs: set[Pair] = set()
    # The value of a program can only fall while other programs are taken. So a program whose recomputed value exceeds
    # the outdated values of all others is the best one (Minoux, 1978, "Accelerated greedy algorithms for maximizing
    # submodular set functions").
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
    """Compute the value per cost of a program's cases: the weighted number of marks and pairs that are not met yet.

    Args:
      program: the cases that share the program, with their rotations.
      met: marks of the programs taken so far.
      met_pairs: pairs of marks of the programs taken so far.
    """
    marks_by_case = [collect_marks(question) for question in program]
    new_marks = frozenset[str]().union(*marks_by_case) - met
    new_pairs = frozenset[Pair]().union(*map(pair_marks, marks_by_case)) - met_pairs
    cost = _estimate_cost(*program[0]) + _SHARED_CASE_COST * (len(program) - 1)
    return (_PAIRS_PER_MARK * len(new_marks) + len(new_pairs)) / cost


def collect_marks(question: Question) -> frozenset[str]:
    """Return the marks of a case, and one more mark for each costly question that its rotation names."""
    case, turn = question
    pulled_back = itertools.chain(turn.pullbacks, turn.cotangents) if case.phase == "train" else ()
    return find_marks(case) | {f"asks {what}" for what in itertools.chain(pulled_back, turn.laws, turn.poisons)}


def _estimate_cost(case: Case, turn: Rotation) -> float:
    """Estimate the cost of a case, in units of one forward program of `dot_product`."""
    multiplications = case.batch * case.num_q_heads * case.q_length * case.kv_length * (case.head_dim + case.v_head_dim)
    calls = len(turn.pullbacks) if case.phase == "train" else 0
    return _FORWARD_COST + _PULLBACK_COST * calls + multiplications * (1 + 3 * bool(calls)) / _MULTIPLICATIONS_PER_COST
