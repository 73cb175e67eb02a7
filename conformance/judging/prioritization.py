"""Order the jobs of a run so that jobs that test the most new properties per second come first.

The level `smoke` is the beginning of this order. It begins with a few programs whose cases have every coarse level
between them (`cases.case_space.coarse_levels`): if all of them fail in the same way, the run ends early
(`conformance.judging.early_end`). The calls of a user's first minute come next, at every level.

A case has *marks* (`cases.case_space.novelty`): properties such as mask, dtype and size. The value of a case is the
number of marks, and pairs of marks, that no earlier case has. Nearly all of the cost of a case is compilation. So cases
that share compiled programs stay together, and cost little more than one case. The next program is always the one with
the highest value per cost, as in greedy set cover (Chvatal, 1979, "A Greedy Heuristic for the Set-Covering Problem").
Costs are constants, not measurements, so the order is the same on every machine.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Sequence, Set

from cases.case import Case
from cases.case_space.coarse_levels import find_coarse_levels
from cases.case_space.novelty import Pair, find_marks, pair_marks
from conformance.check_api.scopes import EXACT, FIRST
from conformance.check_api.subchecks import Subchecks
from conformance.checks import Check
from conformance.judging.job import Job

SMOKE_PROGRAMS = 36
"""Number of compiled programs of the grid that `smoke` judges; docs/cases.md says how long each level takes."""
SMOKE_CHECKS = (
    "first_calls",
    "branches",
    "errors",
    "refusals",
    "limits",
    "differentiation",
    "tangents",
    "front_end",
    "memory",
    "program",
    "aliasing",
    "ensemble",
)
"""Checks with cases of their own, outside the grid, that `smoke` runs: they compile one or two programs each."""
# Of `front_end`, `smoke` has the first two cases, which have every part of a front end between them. Of `ensemble`, it
# has one query over a cache, which shows sums rounded from block to block, truncated results and rounded splits. Of
# `tangents`, it has the case with every operand.
_MOST_SMOKE_CASES = {"front_end": 2, "ensemble": 1, "tangents": 1}

# The number of cases of which `smoke` evaluates the kernel in float64: the plainest, and one with many operands.
_SMOKE_EXACT_CASES = 2
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
    """Order the jobs of one implementation: those that `smoke` begins with, then long jobs, then all others.

    Among the first are also programs with coarse levels that `smoke` lacks. A long job compiles many programs. If it
    began last, it would keep one process busy while the others are idle.
    """
    first = _select_first_jobs(jobs, is_smoke=False)
    first_ids = {id(job) for job in first}
    return first + sorted((job for job in jobs if id(job) not in first_ids), key=lambda job: job.short)


def select_smoke_jobs(jobs: Sequence[Job]) -> list[Job]:
    """Select the jobs of `smoke`: those that every level begins with, a few in float64, and the `SMOKE_CHECKS`."""
    first = _select_first_jobs(jobs, is_smoke=True)
    first_ids = {id(job) for job in first}
    taken: collections.Counter[tuple[str, int]] = collections.Counter()  # cases of each check and seed

    def takes(check: Check, case: Case) -> bool:
        key = check.name, case.seed
        is_taken = check.name in SMOKE_CHECKS and taken[key] < _MOST_SMOKE_CASES.get(check.name, math.inf)
        is_taken = is_taken and (check.name != "ensemble" or case.phase == "decode")
        taken[key] += is_taken
        return is_taken

    off_grid = (
        dataclasses.replace(job, checks=tuple(check for check in job.checks if takes(check, job.case)))
        for job in jobs
        if not job.is_on_grid and id(job) not in first_ids
    )
    exact = [job for job in jobs if {check.scope for check in job.checks} == {EXACT}]
    return first + exact[:_SMOKE_EXACT_CASES] + [job for job in off_grid if job.checks]


def split_to_fail_fast(jobs: Sequence[Job]) -> list[tuple[Job, Job]]:
    """Order jobs so that every check judges a case soon: its first case, and the further jobs, take turns.

    They take turns, since a fault of a mask or a dtype shows in the first cases of the grid, which cost a second each.
    A fault between calls shows in the long jobs only. These compile many programs and are split by check, so that a
    failure shows when its check is done. The other jobs stay whole, since their checks share programs.

    Returns:
      Pairs of a part of a job, which is the job itself if it is not split, and the job.
    """
    parts = [(part, job) for job in jobs for part in _split_by_check(job)]
    met: set[tuple[str, str]] = set()
    first: list[tuple[Job, Job]] = []
    others: list[tuple[Job, Job]] = []
    for part, job in parts:
        checks = {(part.implementation.name, check.name) for check in part.checks}
        (others if checks <= met else first).append((part, job))
        met |= checks
    turns = itertools.zip_longest(first, sorted(others, key=lambda pair: not pair[0].short))
    return [pair for turn in turns for pair in turn if pair is not None]


def _split_by_check(job: Job) -> list[Job]:
    """Return a part of a job for each of its checks; the job alone if it compiles few programs."""
    if job.short or len(job.checks) < 2:
        return [job]
    return [dataclasses.replace(job, checks=(check,)) for check in job.checks]


def _select_first_jobs(jobs: Sequence[Job], *, is_smoke: bool) -> list[Job]:
    """Return the jobs that every level begins with, in their order.

    They are the jobs of the `SMOKE_PROGRAMS` most valuable programs of the grid, and except at `smoke`, of those with
    further coarse levels. The programs that have every coarse level between them come first. After the first few come
    the calls of a user's first minute.
    """
    ordered = order_programs(jobs)
    first, others = ordered[:SMOKE_PROGRAMS], ordered[SMOKE_PROGRAMS:]
    covering = _choose_covering(first)
    further = [] if is_smoke else _choose_covering(others, met=_find_levels(covering))
    rest = [program for program in first if program not in covering]
    programs = [*covering, *further, *rest]
    first_calls = [job for job in jobs if {check.scope for check in job.checks} == {FIRST}]
    programs.insert(_PROGRAMS_BEFORE_FIRST_CALLS, first_calls)
    return [job for program in programs for job in program]


def _choose_covering(programs: Sequence[list[Job]], met: Set[str] = frozenset()) -> list[list[Job]]:
    """Choose programs whose cases have between them every coarse level that any has, apart from those `met`.

    They are chosen one by one, by the number of new levels for the cost of their cases. A cheap one comes first, and
    the most costly one next: other processes judge the others meanwhile.
    """
    missing = _find_levels(programs) - met
    chosen: list[list[Job]] = []
    while missing:
        chosen.append(max(programs, key=lambda program: len(_find_levels([program]) & missing) / _sum_costs(program)))
        missing -= _find_levels(chosen[-1:])
    return chosen[:1] + sorted(chosen[1:], key=_sum_costs, reverse=True)


def _find_levels(programs: Sequence[Sequence[Job]]) -> frozenset[str]:
    """Return the coarse levels of the cases of programs."""
    return frozenset[str]().union(*(find_coarse_levels(program[0].case) for program in programs))


def _sum_costs(program: Sequence[Job]) -> float:
    """Return the cost of a program for each of its cases, so that programs of few cases cost little."""
    return len(program) * _estimate_cost(program[0].case, program[0].selection)


def order_programs(jobs: Sequence[Job]) -> list[list[Job]]:
    """Group the jobs on the grid by compiled program, and order the groups, the most valuable program first."""
    on_grid = [job for job in jobs if job.is_on_grid]
    by_program: dict[str, list[int]] = {}
    for place, job in enumerate(on_grid):
        program_without_seed = job.case.program.rpartition("/")[0]
        by_program.setdefault(program_without_seed, []).append(place)
    places = list(by_program.values())
    judged = tuple(tuple((on_grid[place].case, on_grid[place].selection) for place in program) for program in places)
    return [[on_grid[place] for place in places[number]] for number in _order_greedily(judged)]


JudgedCase = tuple[Case, Subchecks]
"""A case, and the costly subchecks that run on it."""


@functools.lru_cache(maxsize=64)
def _order_greedily(programs: tuple[tuple[JudgedCase, ...], ...]) -> tuple[int, ...]:
    """Return the indices of programs in the order of greedy set cover.

    The result is cached, since kernels that support the same features get the same cases.
    """
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
        for judged in programs[number]:
            met |= collect_marks(judged)
            met_pairs |= pair_marks(collect_marks(judged))
        ordered.append(number)
    return tuple(ordered)


def compute_value(program: Sequence[JudgedCase], met: Set[str], met_pairs: Set[Pair]) -> float:
    """Compute the value per cost of a program's cases: the weighted number of marks and pairs that are not met yet.

    Args:
      program: the cases that share the program, with their costly subchecks.
      met: marks of the programs taken so far.
      met_pairs: pairs of marks of the programs taken so far.
    """
    marks_by_case = [collect_marks(judged) for judged in program]
    new_marks = frozenset[str]().union(*marks_by_case) - met
    new_pairs = frozenset[Pair]().union(*map(pair_marks, marks_by_case)) - met_pairs
    cost = _estimate_cost(*program[0]) + _SHARED_CASE_COST * (len(program) - 1)
    return (_PAIRS_PER_MARK * len(new_marks) + len(new_pairs)) / cost


def collect_marks(judged: JudgedCase) -> frozenset[str]:
    """Return the marks of a case, and one more mark for each costly subcheck that runs on it."""
    case, chosen = judged
    pulled_back = itertools.chain(chosen.pullbacks, chosen.cotangents) if case.phase == "train" else ()
    return find_marks(case) | {f"asks {what}" for what in itertools.chain(pulled_back, chosen.laws, chosen.poisons)}


def _estimate_cost(case: Case, selection: Subchecks) -> float:
    """Estimate the cost of a case, in units of one forward program of `dot_product`."""
    multiplications = case.batch * case.num_q_heads * case.q_length * case.kv_length * (case.head_dim + case.v_head_dim)
    calls = len(selection.pullbacks) if case.phase == "train" else 0
    return _FORWARD_COST + _PULLBACK_COST * calls + multiplications * (1 + 3 * bool(calls)) / _MULTIPLICATIONS_PER_COST
