"""The task of the check `branches`: trace a kernel on cases, and search for cases that reach its other branches.

A trace is abstract (`jax.eval_shape`): it runs the kernel's Python code on shapes, computes nothing, and takes
milliseconds. First the cases of the run are traced. For each outcome of a condition that none of them has, the search
then changes the case that came nearest:

1. The operands of a comparison are at hand. Each number of the case is changed a little, to see how the operands depend
   on it, and then by what the difference of the operands asks for (the secant method).
2. The numbers in the condition become sizes.
3. The keys of a table become sizes, if the condition may ask what a table holds.
4. The case gets another dtype, mask or operand, or loses one.

Any outcome that a case on the way reaches counts. The search takes a limited number of traces. So its result does not
depend on how fast the machine is, unless its time runs out.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import islice
from typing import Any

import jax
import numpy as np

from cases.case import Case
from cases.case_id import parse_case_id
from cases.case_space.case_changes import Number, change_number, list_numbers, list_properties, reduce_case
from cases.operand_values import build_hollow_problem
from conformance.execution.branch_probes import Condition, Observation, Plain, Recording, record_branches
from conformance.execution.executor import Executor, pull_back
from conformance.execution.kernel_constants import find_code_numbers

Branch = tuple[int, bool]
"""A condition by its index, and one of its outcomes."""

_MIN_TRACED = 8
"""The fewest cases of a run that are traced, even if they reach all branches."""
_ENOUGH_TRACED = 12
"""If a condition had equal operands in so many cases, no operand of the call decides it, and it is not searched."""
_VARIANT_CASES = 2
"""The number of cases on which declared variants are traced."""
_MAX_ATTEMPTS = 48
"""The most cases that are tried in one way for one branch."""
_TABLE_SIZES = ("B", "T", "S", "N", "K", "HV", "V")
"""The sizes that a key of a table may stand for, in the order of a key."""
_STEPS = 4
"""The most traces in which one number of a case is solved for."""
_MAX_ELEMENTS = 6
"""The most elements of a container that are aimed at."""
_MAX_TEXT = 40
# Differences of the operands that give an outcome, by the operator.
_WANTED: Mapping[tuple[str, bool], tuple[int, ...]] = {
    ("==", True): (0,),
    ("==", False): (1, -1),
    ("!=", True): (1, -1),
    ("!=", False): (0,),
    ("<", True): (-1,),
    ("<", False): (0, 1),
    ("<=", True): (0, -1),
    ("<=", False): (1,),
    (">", True): (1,),
    (">", False): (0, -1),
    (">=", True): (0, 1),
    (">=", False): (-1,),
}


@dataclasses.dataclass(frozen=True)
class Trace:
    """The observations of a traced case by condition, and the exception that the trace ended with.

    Attributes:
      seen: what was seen of each condition.
      is_whole: whether all calls of the case were traced.
      error: the exception, as text; empty if there was none.
      is_refusal: whether the kernel's own source raised it, as a NotImplementedError or a ValueError.
    """

    seen: Mapping[int, Observation]
    is_whole: bool
    error: str = ""
    is_refusal: bool = False

    def get(self, index: int) -> Observation:
        """Return what was seen of a condition; it is empty in code that an earlier trace had run and JAX kept."""
        return self.seen.get(index, Observation())


def search_branches(
    executor: Executor,
    planned: Sequence[str],
    packages: Sequence[str],
    traces: int,
    seconds: float,
    *,
    beyond_numbers: bool = False,
) -> dict[str, Any]:
    """Trace the planned cases, and search for cases that reach other branches.

    Args:
      planned: the ids of the cases that the run judges.
      packages: packages whose branches are recorded, besides those of the kernel's folder.
      traces: the most traces.
      seconds: the most processor seconds, after which the search is cut off.
      beyond_numbers: whether cases longer than numbers in the source are chosen.

    Returns:
      `conditions`: file, line, text and kind of each condition that was met; `unreached`: the branches that no case
      reaches, each with its condition's index, outcome and nearest operands; `found`: the ids of cases that reach
      branches which no planned case reaches, each with these branches; `refused`: branches that only refused calls
      reach, each with a case and its exception; `beyond`: the ids of cases that are longer than the largest number in
      the source, each with the number; `absent`: packages that the kernel does not import; `traces`; `is_cut_off`.
    """
    jax.clear_caches()  # code under an inner `jit` runs only while it is traced, so earlier traces would hide it
    with record_branches(executor.implementation.call, packages) as recording:
        search = _Search(executor, recording, traces, time.process_time() + seconds)
        try:
            search.trace_planned([parse_case_id(text) for text in planned])
            search.run()
        except _OutOfBudget:
            search.is_cut_off = True
        found = search.choose_cases()
        cases = [*map(parse_case_id, planned), *(case for case, _ in found)]
        beyond = _list_cases_beyond(executor, cases) if beyond_numbers else []
    absent = [package for package in packages if package not in sys.modules]
    return {**_describe(search, found), "beyond": [[case.id, number] for case, number in beyond], "absent": absent}


def _list_cases_beyond(executor: Executor, cases: Sequence[Case]) -> list[tuple[Case, int]]:
    """List a case with more keys, and one with more queries, than the largest number in the source.

    A kernel may compare such a number with values and not with sizes: it may count positions in 16 bits, or the rows of
    a launch. A quarter of the keys or queries lies beyond the number, so that they matter. There is no such case if
    other cases are as long.
    """
    code_numbers = find_code_numbers(executor.implementation)
    numbers = sorted((n for n in code_numbers.integers if n in code_numbers.in_source), reverse=True)
    chosen = []
    for name, phases in (("S", ("decode", "prefill")), ("T", ("train", "prefill"))):
        bases = [case for phase in phases for case in cases if case.phase == phase and case.dtype == "f32"]
        base = min(bases, key=lambda case: len(case.id), default=None)
        longest = max(list_numbers(case)[name] for case in cases)
        if base is None or (name == "T" and base.storage is not None):  # a cache has as many keys as queries
            continue
        longer = ((change_number(base, name, n + n // 4), n) for n in numbers if n >= longest)
        usable = ((case, n) for case, n in longer if case and executor.implementation.supports(case) is None)
        chosen += list(islice(usable, 1))
    return chosen


class _OutOfBudget(Exception):
    """Raised if no further trace may be made."""


class _Search:
    """The cases that were traced, and the branches that they reach."""

    def __init__(self, executor: Executor, recording: Recording, traces: int, deadline: float) -> None:
        self.recording = recording
        self.traced: dict[Case, Trace] = {}
        self.planned: dict[Case, None] = {}
        self.is_cut_off = False
        self._executor = executor
        self._left, self._deadline = traces, deadline
        self._cases_of: dict[Branch, list[Case]] = collections.defaultdict(list)
        self._refusals_of: dict[Branch, list[Case]] = collections.defaultdict(list)
        self._operands_of: dict[int, list[tuple[Plain, ...]]] = collections.defaultdict(list)
        self._by_variants: set[Branch] = set()
        self._properties: dict[Case, list[Case]] = {}

    def trace_planned(self, planned: Sequence[Case]) -> None:
        """Trace the cases of the run, until all branches that were met are reached.

        First one call of each case is traced, in turn with residuals, with gradients and without both. If they leave
        branches that depend on the case, all calls of each case are traced.
        """
        for number, case in enumerate(planned):
            if number >= _MIN_TRACED and not self.list_unreached():
                break
            self.trace(case, turn=number)
            self.planned[case] = None
        self._trace_variants()
        if any(self._depends_on_case(index) for index, _ in self.list_unreached()):
            for case in self.planned:
                self.trace(case)

    def _trace_variants(self) -> None:
        """Trace the declared variants, such as other block sizes, and the parts, on the first cases of the run."""
        for case in list(self.planned)[:_VARIANT_CASES]:
            for name in ("", *self._executor.implementation.variants):
                self.recording.clear()
                with contextlib.suppress(Exception):  # a variant may decline the case
                    _trace_variant(self._executor, name, case)
                self._by_variants |= {(index, x) for index, seen in self.recording.seen.items() for x in seen.outcomes}

    def trace(self, case: Case, turn: int | None = None) -> Trace | None:
        """Trace a case once; None if the kernel does not support it. Raises `_OutOfBudget`.

        Args:
          case: the case.
          turn: the number of the only call to trace; None for all its calls.
        """
        before = self.traced.get(case)
        if before is not None and (before.is_whole or turn is not None):
            return before
        if self._executor.implementation.supports(case) is not None:
            return None
        if self._left <= 0 or time.process_time() > self._deadline:
            raise _OutOfBudget
        self._left -= turn is None
        self.recording.clear()
        error, is_refusal = _trace_case(self._executor, case, turn, {c.file for c in self.recording.conditions})
        # Code under an inner `jit` that was traced before does not run again.
        all_seen = self.recording.seen if before is None else {**before.seen, **self.recording.seen}
        found = Trace(all_seen, turn is None, error, is_refusal)
        self.traced[case] = found
        for index, seen in self.recording.seen.items():
            for outcome in seen.outcomes:
                (self._refusals_of if found.is_refusal else self._cases_of)[index, outcome].append(case)
            self._operands_of[index].append(tuple(seen.operands))
        return found

    def list_unreached(self) -> list[Branch]:
        """List the branches beside the reached ones, without those that only raise an exception."""
        met = dict.fromkeys(index for index, _ in (*self._cases_of, *self._refusals_of))
        return [
            (index, outcome)
            for index in met
            for outcome in (True, False)
            if not self._cases_of.get((index, outcome)) and not self._is_left_out(index, outcome)
        ]

    def _is_left_out(self, index: int, outcome: bool) -> bool:
        return (index, outcome) in self._by_variants or self._follows_nothing(index, outcome)

    def _follows_nothing(self, index: int, outcome: bool) -> bool:
        """Tell whether only an exception, or the end of a loop, follows an outcome."""
        condition = self.recording.conditions[index]
        return condition.raises[outcome] or (condition.is_loop and not outcome)

    def run(self) -> None:
        """Search until all branches are reached, or nothing is left to try; not for a kernel that always raises."""
        if all(traced.error for traced in self.traced.values()):
            return
        tried: set[tuple[str, Branch, Case]] = set()
        while (found := self._choose_attempt(tried)) is not None:
            tried.add(found)
            way, branch, base = found
            for case in islice(_WAYS[way](self, branch, base), _MAX_ATTEMPTS):
                self.trace(case)
                if self._cases_of.get(branch):
                    break

    def _choose_attempt(self, tried: Set[tuple[str, Branch, Case]]) -> tuple[str, Branch, Case] | None:
        """Choose the next way to search for a branch from a case; None if all were tried.

        Cheap ways come first, and branches beside newly reached ones: they are behind a condition that was just passed.
        """
        branches = reversed(self.list_unreached())
        bases = [(branch, case) for branch in branches for case in self._choose_bases(branch)]
        # What a table has for some sizes may be the same for all that were tried.
        attempts = (
            (way, *base) for way in _WAYS for base in bases if way == "tables" or self._depends_on_case(base[0][0])
        )
        return next((attempt for attempt in attempts if attempt not in tried), None)

    def _depends_on_case(self, index: int) -> bool:
        """Tell whether the operands of a condition differ from case to case, or are known of few cases only."""
        operands = self._operands_of[index]
        return len(operands) < _ENOUGH_TRACED or len(set(operands)) > 1

    def _choose_bases(self, branch: Branch) -> list[Case]:
        """Choose the cases from which a branch is searched: the one with the nearest operands, and the first."""
        index, outcome = branch
        beside = self._cases_of.get((index, not outcome), []) or self._refusals_of.get((index, not outcome), [])
        if not beside:
            return []
        nearest = min(beside, key=lambda case: _find_distance(self.traced[case].get(index), outcome))
        return list(dict.fromkeys((nearest, beside[0])))

    def _use_tables(self, branch: Branch, base: Case) -> Iterator[Case]:
        """Yield cases with the sizes that a table has as a key, if the condition may ask what a table holds."""
        seen = self.traced[base].get(branch[0]).operands
        if any(isinstance(operand, int | float) for _, *operands in seen for operand in operands):
            return
        for key in sorted(self.recording.table_keys, key=lambda key: (len(key), key)):
            for names in itertools.combinations(_TABLE_SIZES, len(key)):
                case: Case | None = base
                for name, value in zip(names, key, strict=True):
                    case = None if case is None else change_number(case, name, value)
                if case is not None:
                    yield case

    def _change_properties(self, branch: Branch, base: Case) -> list[Case]:
        """Return cases with another dtype, mask or operand."""
        del branch
        if base not in self._properties:
            self._properties[base] = list(list_properties(base, self._executor.implementation.supports))
        return self._properties[base]

    def _solve(self, branch: Branch, base: Case) -> Iterator[Case]:
        """Yield cases for which the operands of a comparison should differ as the outcome asks."""
        index, outcome = branch
        for symbol, left, right in self.traced[base].get(index).operands:
            for aims in _list_aims(symbol, left, right, outcome):
                yield from self._solve_aims(index, base, aims)

    def _solve_aims(self, index: int, base: Case, aims: Sequence[Aim]) -> Iterator[Case]:
        """Yield cases in which the operands have the wanted differences, each by another number of the case."""
        aim, *others = aims
        first = aim.read(self.traced[base].seen.get(index))
        if first is None:
            return
        for (name, start), step in itertools.product(list_numbers(base).items(), (1, 0)):
            value, gap = start, first
            following: Number = start + 1 if step else 2 * start  # twice as much where whole blocks are required
            for _ in range(_STEPS):
                case = change_number(base, name, following)
                traced = None if case is None else self.trace(case)
                if case is None or traced is None:
                    break
                yield case
                new_gap = aim.read(traced.seen.get(index))
                if new_gap is None or new_gap == gap:
                    break
                if new_gap == aim.wanted:
                    if others:
                        yield from self._solve_aims(index, case, others)
                    break
                slope = (new_gap - gap) / (following - value)
                value, gap = following, new_gap
                following += (aim.wanted - gap) / slope
                if isinstance(start, int):
                    following = round(following)
                if following == value:
                    break

    def _use_numbers(self, branch: Branch, base: Case) -> Iterator[Case]:
        """Yield cases with sizes beside the numbers in a condition, and beside their multiples."""
        condition = self.recording.conditions[branch[0]]
        numbers = [n for n in condition.numbers if n > 2]
        values = {c * n + d for c in numbers for n in (1, 2, 3) for d in (0, 1, -1, *condition.numbers)}
        for name, value in itertools.product(list_numbers(base), sorted(values)):
            if (case := change_number(base, name, value)) is not None:
                yield case

    def choose_cases(self) -> list[tuple[Case, list[Branch]]]:
        """Choose few and plain cases that reach all branches which planned cases do not reach."""
        missing = {
            branch: cases[0]
            for branch, cases in self._cases_of.items()
            if not self._is_left_out(*branch) and self.planned.keys().isdisjoint(cases)
        }
        chosen: list[tuple[Case, list[Branch]]] = []
        while missing:
            branch, case = next(reversed(missing.items()))
            case = self._reduce(case, branch)
            reached = [each for each in missing if case in self._cases_of[each]]
            chosen.append((case, reached))
            missing = {each: first for each, first in missing.items() if each not in reached}
        return chosen

    def _reduce(self, case: Case, branch: Branch) -> Case:
        """Return a plainer case that reaches the branch too, if one is found in the traces that are left."""
        self._left = max(self._left, 0) + 24
        try:
            while True:
                for plainer in reduce_case(case):
                    if self.trace(plainer) is not None and plainer in self._cases_of[branch]:
                        case = plainer
                        break
                else:
                    return case
        except _OutOfBudget:
            return case

    def describe_nearest(self, index: int, outcome: bool) -> str:
        """Describe the operands that came nearest to an outcome, such as `16 > 16`; empty if none are known."""
        beside = [*self._cases_of.get((index, not outcome), []), *self._refusals_of.get((index, not outcome), [])]
        seen = [self.traced[case].get(index) for case in beside]
        nearest = min(seen, key=lambda each: _find_distance(each, outcome), default=Observation())
        if not nearest.operands:
            return ""
        symbol, left, right = nearest.operands[0]
        return f"{_format_operand(left)} {symbol} {_format_operand(right)}"

    def count_reached(self) -> int:
        """Count the branches that were reached, without those that only raise an exception."""
        reached = {branch for branch, cases in self._cases_of.items() if cases} | self._by_variants
        return sum(not self._follows_nothing(*branch) for branch in reached)

    def list_refused(self) -> list[tuple[Branch, Case]]:
        """List the branches that only refused calls reach, each with the first such case."""
        return [(branch, cases[0]) for branch, cases in self._refusals_of.items() if not self._cases_of.get(branch)]


Read = Callable[["Observation | None"], "Number | None"]


_WAYS: Mapping[str, Callable[[_Search, Branch, Case], Iterable[Case]]] = {
    "operands": _Search._solve,
    "numbers": _Search._use_numbers,
    "tables": _Search._use_tables,
    "properties": _Search._change_properties,
}
"""The ways to search for a branch from a case, the cheapest first."""


@dataclasses.dataclass(frozen=True)
class Aim:
    """A wanted difference of one component of the operands of a comparison.

    Attributes:
      wanted: the difference that the outcome asks for.
      read: reads the difference from an observation; None if it has no such operands.
    """

    wanted: Number
    read: Read


def _list_aims(symbol: str, left: Plain, right: Plain, outcome: bool) -> list[list[Aim]]:
    """List the ways to give a comparison an outcome, each with an aim for every component of the operands."""
    if symbol in ("in", "not in"):
        if not isinstance(right, tuple) or outcome is (symbol == "not in"):
            return []
        return [aims for element in right if (aims := _aim_at(left, element))][:_MAX_ELEMENTS]
    if isinstance(left, tuple) and isinstance(right, tuple):
        aims = _aim_at(left, right) if (symbol, outcome) in (("==", True), ("!=", False)) else []
        return [aims] if aims else []
    if not (isinstance(left, int | float) and isinstance(right, int | float)):
        return []
    return [[Aim(wanted, _read_difference)] for wanted in _WANTED.get((symbol, outcome), ())]


def _aim_at(left: Plain, target: Plain) -> list[Aim]:
    """Return an aim for each component of `left` that differs from the target; empty if they are not of numbers."""
    ours, goals = (each if isinstance(each, tuple) else (each,) for each in (left, target))
    if len(ours) != len(goals) or not all(isinstance(each, int | float) for each in (*ours, *goals)):
        return []
    return [Aim(0, _build_reader(place, goal)) for place, goal in enumerate(goals) if ours[place] != goal]


def _build_reader(place: int, goal: Any) -> Read:
    """Build what reads the difference of a component of the first operand from a goal."""

    def read(seen: Observation | None) -> Number | None:
        value = seen.operands[0][1] if seen is not None and seen.operands else None
        got = value[place] if isinstance(value, tuple) and place < len(value) else value
        return got - goal if isinstance(got, int | float) else None

    return read


def _read_difference(seen: Observation | None) -> Number | None:
    """Read the difference of two numbers that were compared."""
    for _, left, right in () if seen is None else seen.operands:
        if isinstance(left, int | float) and isinstance(right, int | float):
            return left - right
    return None


def _find_distance(seen: Observation, outcome: bool) -> float:
    """Return how far the operands of a comparison are from an outcome; infinite if they are no numbers."""
    ways = [aims for operands in seen.operands for aims in _list_aims(*operands, outcome)]
    sums = [sum(abs((aim.read(seen) or 0) - aim.wanted) for aim in aims) for aims in ways]
    return min(sums, default=float("inf"))


def _trace_case(executor: Executor, case: Case, turn: int | None, files: set[str]) -> tuple[str, bool]:
    """Trace the calls of a case that its checks make, and return an exception as text, and whether it is a refusal."""
    try:
        _trace_calls(executor, case, turn)
    except Exception as error:  # a kernel may raise any exception
        frames = traceback.extract_tb(error.__traceback__)
        is_own = bool(frames) and frames[-1].filename in files
        return f"{type(error).__name__}: {error}"[:200], is_own and isinstance(error, NotImplementedError | ValueError)
    return "", False


def _trace_calls(executor: Executor, case: Case, turn: int | None = None) -> None:
    """Trace the calls of a case that its checks make, or one: with gradients, with residuals, and without both."""
    implementation = executor.implementation
    problem = build_hollow_problem(case)
    call, arrays = executor.bind(problem)

    def call_with_residuals(given: Mapping[str, Any]) -> Any:
        statics, _ = executor.arguments(problem)
        return implementation.call(**given, **statics, save_residuals=True)

    def compute_gradients(given: Mapping[str, Any]) -> Any:
        shape = (case.batch, case.q_length, case.num_q_heads, case.v_head_dim)
        return pull_back(call, given, np.broadcast_to(np.zeros((), problem.q.dtype), shape))

    has_gradients = case.phase == "train" and bool(implementation.gradients)
    calls = [compute_gradients] * has_gradients + [call_with_residuals] * implementation.has_residual_call + [call]
    for function in calls if turn is None else [calls[turn % len(calls)]]:
        jax.eval_shape(function, arrays)


def _format_operand(value: Plain) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."


def _trace_variant(executor: Executor, name: str, case: Case) -> None:
    """Trace a declared variant, or the parts for an empty name, and the gradients of a variant."""
    implementation = executor.implementation
    if name:
        _trace_calls(executor.variant(name), case)
    elif implementation.parts is not None:
        statics, arrays = executor.arguments(build_hollow_problem(case))
        jax.eval_shape(functools.partial(implementation.parts, **statics), **arrays)


def _describe(search: _Search, found: Sequence[tuple[Case, Sequence[Branch]]]) -> dict[str, Any]:
    """Describe the result of a search in plain data."""
    conditions = search.recording.conditions
    unreached = search.list_unreached()
    refused = search.list_refused()
    named = [*(index for index, _ in unreached), *(index for (index, _), _ in refused)]
    named += [index for _, branches in found for index, _ in branches]
    root = os.path.commonpath([os.path.dirname(os.path.abspath(c.file)) for c in conditions]) if conditions else ""
    return {
        "conditions": {str(index): _describe_condition(conditions[index], root) for index in dict.fromkeys(named)},
        "unreached": [[index, outcome, search.describe_nearest(index, outcome)] for index, outcome in unreached],
        "found": [[case.id, [list(branch) for branch in branches]] for case, branches in found],
        "refused": [[*branch, case.id, search.traced[case].error] for branch, case in refused],
        "reached": search.count_reached(),
        "traces": len(search.traced),
        "is_cut_off": search.is_cut_off,
    }


def _describe_condition(condition: Condition, root: str) -> list[Any]:
    return [os.path.relpath(condition.file, root), condition.line, condition.text, condition.is_loop]
