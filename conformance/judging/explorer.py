"""Explore beyond the grid: draw cases from the whole case space until one is wrong, then shrink it.

Hypothesis draws and shrinks the cases. It is made for tests that take microseconds, but judging a case takes about a
second, nearly all of it compilation. So Hypothesis is used in an unusual way:

- It runs in small batches, so it neither repeats nor mutates a case within a batch.
- Several batches fill a pool. Of each pool, only the cases with the most new combinations of properties are judged.
- While a case shrinks, only the check that failed is run.

Cases that reach branches of the kernel's source which no case of the grids reaches come first, as in a run
(`conformance.executor_tasks.branch_search`). Then half of the cases are drawn from the whole space. The other half has
sizes, masks and numbers near the *code numbers*: numbers found in the kernel's source
(`conformance.execution.kernel_constants`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Literal

import hypothesis
import msgspec
from hypothesis import configuration

from cases.case import Case, CaseIdError
from cases.case_id import matches_query
from cases.case_space.alternatives import NothingToDraw
from cases.case_space.case_changes import reduce_case
from cases.case_space.case_strategies import draw_cases
from cases.case_space.code_numbers import CodeNumbers
from cases.case_space.novelty import Novelty
from conformance import interrupts
from conformance.check_api.scopes import GRID, ImplementationGrids
from conformance.checks import CHECKS, Check
from conformance.checks.branches import search_from
from conformance.execution import kernel_errors
from conformance.execution.kernel_constants import report_code_numbers
from conformance.judging.exploration import (
    Exploration,
    JudgedCase,
    build_exploration_runner,
    compute_plainness,
    describe_exploration,
)
from conformance.judging.job import Job
from conformance.judging.parallel_judging import judge_in_parallel
from conformance.judging.settings import Settings
from conformance.judging.task_pools import TaskPool
from conformance.sandbox.kernel_options import KernelOptions
from conformance.sandbox.kernel_process import ProcessLost
from conformance.sandbox.sandboxed_executor import create_executor
from conformance.temporary_folders import use_temporary_folder
from conformance.truth import disk_cache
from impls.contract.implementation import Implementation
from reports import records
from reports.records import Record

_CI_EXAMPLES = 50
_EXPLORE_SECONDS = 60.0
_SHRINK_GRACE_SECONDS = 30.0
"""Seconds that shrinking may take beyond the time budget. If half the budget is more, shrinking may take that."""
_DEFAULT_SHRINK_SECONDS = 120.0
"""Seconds that shrinking may take if there is no time budget."""

# The number of cases in a batch. With fewer than ten, Hypothesis does not mutate earlier cases to draw the next one.
_BATCH_EXAMPLES = 9
_BATCHES_PER_POOL = 3  # the number of batches that fill a pool
_JUDGED_PER_POOL = 6  # the number of cases of each pool that are judged
_SEARCHED_FROM = 24  # the number of cases of the grid from which branches are searched
_MAX_FRUITLESS_ROUNDS = 5  # after this many rounds without a new case, the space counts as exhausted

__all__ = [
    "Budget",
    "Exploration",
    "JudgedCase",
    "NothingToDraw",
    "build_budget",
    "compute_plainness",
    "describe_exploration",
    "explore",
]

_Strategy = hypothesis.strategies.SearchStrategy[Case]
_Pool = dict[Case, int]
"""Drawn cases that await judgement, each with the seed of the batch that drew it."""

_GRID_CHECKS = tuple(check for check in CHECKS if check.scope is GRID)
_WRONG = frozenset({records.FAIL, records.ERROR})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """The limits after which an exploration stops, and its seed.

    Attributes:
      seconds: time for drawing and judging; None for no limit. A case whose judging has begun is finished.
      examples: the largest number of cases to judge; None for no limit.
      seed: the seed of all draws. The same seed draws the same cases for the same kernel and the same version of
        Hypothesis, which takes constants from the source of the code that it tests.
    """

    seconds: float | None
    examples: int | None
    seed: int

    def __post_init__(self) -> None:
        if self.seconds is None and self.examples is None:
            raise ValueError("seconds or examples must limit the exploration")
        for name, value in (("seconds", self.seconds), ("examples", self.examples)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value:g}")

    @property
    def shrink_seconds(self) -> float:
        """Seconds after which shrinking stops.

        With a time budget they count from the start of the exploration, otherwise from the first wrong case.
        """
        return (
            _DEFAULT_SHRINK_SECONDS
            if self.seconds is None
            else self.seconds + max(_SHRINK_GRACE_SECONDS, self.seconds / 2)
        )


def build_budget(
    profile: Literal["ci", "explore"],
    *,
    seconds: float | None = None,
    examples: int | None = None,
    seed: int | None = None,
) -> Budget:
    """Build the budget of a profile; `seconds`, `examples` and `seed` replace the profile's own values.

    `ci` judges a fixed number of cases from seed 0, so the cases are the same every time. `explore` judges cases from a
    random seed for a fixed time.

    Raises:
      ValueError: for a limit that is not positive.
    """
    if profile == "ci":
        return Budget(seconds=seconds, examples=_CI_EXAMPLES if examples is None else examples, seed=seed or 0)
    drawn = random.SystemRandom().getrandbits(32) if seed is None else seed
    return Budget(seconds=_EXPLORE_SECONDS if seconds is None else seconds, examples=examples, seed=drawn)


class InvalidCodeNumbers(Exception):
    """The kernel's process sent no valid code numbers or branches; the message is one line."""


_MAX_NUMBERS = 64  # more than `report_code_numbers` ever returns
_Number = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]
# The type of the code numbers that `report_code_numbers` returns: integers, floats, and the numbers of both that are in
# the source.
_SentNumbers = tuple[
    Annotated[list[Annotated[int, msgspec.Meta(gt=2, le=2**17)]], msgspec.Meta(max_length=_MAX_NUMBERS)],
    Annotated[list[_Number], msgspec.Meta(max_length=_MAX_NUMBERS)],
    Annotated[list[_Number], msgspec.Meta(max_length=2 * _MAX_NUMBERS)],
]


def _request_code_numbers(implementation: Implementation) -> CodeNumbers:
    """Request the code numbers, the numbers in a kernel's source, from the kernel's process.

    Raises:
      InvalidCodeNumbers: if the answer is no valid list of numbers. The kernel can forge the answer.
    """
    with _convert_errors(implementation, "list of the numbers in its source"):
        integers, floats, in_source = msgspec.convert(
            create_executor(implementation).run(report_code_numbers), _SentNumbers
        )
    return CodeNumbers(tuple(integers), tuple(floats), frozenset(in_source))


@contextlib.contextmanager
def _convert_errors(implementation: Implementation, wanted: str) -> Iterator[None]:
    """Raise `InvalidCodeNumbers` for any error of the block, which asks the kernel's process for what is wanted."""
    try:
        yield
    except (Exception, ProcessLost) as error:  # the kernel can also choose the exception
        reason = (
            str(error)
            if isinstance(error, msgspec.ValidationError | ProcessLost | CaseIdError)
            else kernel_errors.describe_kernel_error(error)
        )
        raise InvalidCodeNumbers(f"{implementation.name} sent no valid {wanted}: {reason}") from error


class OutOfTime(BaseException):
    """Raised in a test to end Hypothesis's run, since the time is up.

    This is no `Exception`: Hypothesis would take one for a failing example and shrink it.
    """


class _BatchDecided(Exception):
    """Raised to end a batch: a case is wrong and all before it are right, or the time is up."""


class WrongCase(Exception):
    """Raised in a test for a wrong case, so that Hypothesis shrinks the case."""


def explore(
    implementation: Implementation,
    settings: Settings,
    budget: Budget,
    *,
    query: str | None = None,
    code_numbers: CodeNumbers | None = None,
    on_case: Callable[[JudgedCase], None] = lambda seen: None,
    options: Sequence[str] = (),
    pool: TaskPool | None = None,
    kernels: KernelOptions | None = None,
) -> Exploration:
    """Draw cases that `implementation` supports and judge them, until one is wrong or the budget is spent.

    Args:
      implementation: the implementation to judge.
      settings: tolerances and expected failures. A case that passes where a failure is expected does not count as
        wrong.
      budget: the limits after which the exploration stops.
      query: draw only cases that this query matches.
      code_numbers: numbers near which sizes are tried; by default the numbers found in the implementation's source.
      on_case: called with each judged case.
      options: command-line options for the commands that reproduce a record: how the kernel is found and run.
      pool: judges drawn cases in its processes, several at once; None to judge them here. A wrong case is shrunk here.
        The first wrong case in the order of drawing counts, so a pool changes nothing but the time.
      kernels: how the processes of `pool` find the kernel, and where they run it.

    Raises:
      cases.case_space.alternatives.NothingToDraw: if no plain case is both supported and matched by `query`.
      InvalidCodeNumbers: if the kernel's process sends no valid code numbers.
    """
    found_numbers = _request_code_numbers(implementation) if code_numbers is None else code_numbers
    explorer = _Explorer(
        implementation, settings, budget, query, found_numbers, on_case, options, pool, kernels or KernelOptions()
    )
    return explorer.run()


class _Explorer:
    """The state of one exploration: the cases that were drawn, judged and shrunk so far."""

    def __init__(
        self,
        implementation: Implementation,
        settings: Settings,
        budget: Budget,
        query: str | None,
        code_numbers: CodeNumbers,
        on_case: Callable[[JudgedCase], None],
        options: Sequence[str],
        pool: TaskPool | None,
        kernels: KernelOptions,
    ) -> None:
        self._runner = build_exploration_runner(settings, options)
        self._pool, self._kernels = pool, kernels
        self._implementation = implementation
        self._budget = budget
        self._query = query
        self._code_numbers = code_numbers
        self._on_case = on_case
        self._novelty = Novelty((), code_numbers)
        self._started = time.monotonic()
        self._right: dict[Case, list[Record]] = {}
        self._wrong: dict[Case, list[Record]] = {}
        self._right_smaller: set[Case] = set()  # cases judged right while shrinking
        self._first: Case | None = None
        self._found_at = 0.0
        self._declined: set[Case] = set()
        self._shrunk = self._shrinking = self._interrupted = False

    def run(self) -> Exploration:
        """Explore without leaving files of Hypothesis, and without caching oracle results."""
        with use_temporary_home(), disk_cache.disable_cache():  # caching is useless, since later runs draw other cases
            return self._run()

    def _run(self) -> Exploration:
        try:
            interrupts.raise_if_stopped()
            with contextlib.suppress(OutOfTime):
                strategies = [draw_cases(self._supports)]
                if self._code_numbers:
                    strategies.insert(0, draw_cases(self._supports, code_numbers=self._code_numbers))
                # `draw_cases` asks which cases are supported, to find what can be drawn. Those declined do not count.
                self._declined.clear()
                grids = ImplementationGrids(self._implementation, "quick", 0)
                gridded = {case for grid in grids.all_grids for case in grid.cases}
                self._novelty = Novelty(gridded, self._code_numbers)
                self._judge_behind_branches(grids.grid.cases)
                self._draw(strategies)
            self._judge_fully()
        except KeyboardInterrupt:
            self._interrupted = True
        return self._build_result()

    def _supports(self, case: Case) -> str | None:
        """Return why a case may not be drawn (no match with the query, or not supported); None if it may."""
        # The time is checked here too: if no drawn case matches the query, no case is ever judged.
        if self._first is None and self._is_late():
            raise OutOfTime
        if self._query is not None and not matches_query(self._query, case.id):
            return f"does not match {self._query}"
        reason = self._implementation.supports(case)
        if reason is not None:
            self._declined.add(case)
        return reason

    def _judge_behind_branches(self, known: Sequence[Case]) -> None:
        """Judge cases that reach branches which the first known cases do not reach, until one is wrong.

        Raises:
          InvalidCodeNumbers: if the kernel's process sends no valid result. The kernel can forge the result.
        """
        planned = [case for case in known[:_SEARCHED_FROM] if self._supports(case) is None]
        if not planned:
            return
        with _convert_errors(self._implementation, "result of the search for branches"):
            executor = create_executor(self._implementation)
            further = search_from(executor, [case.id for case in planned], beyond_numbers=True).list_cases()
        for case in dict.fromkeys(each.case for each in further):
            if case in planned or self._supports(case) is not None:
                continue
            self._raise_if_spent()
            self._novelty.add_case(case)
            if self._add_drawn(case, self._runner.judge(Job(self._implementation, case, _GRID_CHECKS))):
                self._reduce(case)
                return

    def _reduce(self, case: Case) -> None:
        """Make a wrong case plainer, one change at a time, while it stays wrong."""
        plainer = next(
            (each for each in reduce_case(case) if self._supports(each) is None and self._judge_smaller(each)), None
        )
        if plainer is not None:
            self._reduce(plainer)
        self._shrunk = True

    def _draw(self, strategies: Sequence[_Strategy]) -> None:
        """Draw and judge pools of cases until one is wrong, or several rounds find no new case."""
        seeds = random.Random(self._budget.seed)
        fruitless = 0
        while self._first is None and fruitless < _MAX_FRUITLESS_ROUNDS:
            before = len(self._right)
            pools = [
                self._draw_pool(strategy, [seeds.getrandbits(64) for _ in range(_BATCHES_PER_POOL)])
                for strategy in strategies
            ]
            self._judge_pools(strategies, pools)
            fruitless = fruitless + 1 if len(self._right) == before else 0

    def _draw_pool(self, strategy: _Strategy, seeds: Sequence[int]) -> _Pool:
        """Draw one batch for each seed, and return the drawn cases that were not judged yet."""
        pool: _Pool = {}
        for seed in seeds:
            drawn: list[Case] = []
            self._run_batch(strategy, seed, drawn.append)
            pool.update((case, seed) for case in drawn if case not in pool and case not in self._right)
        return pool

    def _judge_pools(self, strategies: Sequence[_Strategy], pools: Sequence[_Pool]) -> None:
        """Judge the most novel cases of the pools until one is wrong.

        Then draw its batch again, so that Hypothesis shrinks the case.
        """
        for number, case, judged in self._judge_chosen(self._choose_cases(pools)):
            if self._add_drawn(case, judged):
                self._run_batch(strategies[number], pools[number][case], self._raise_if_wrong)
                return

    def _choose_cases(self, pools: Sequence[_Pool]) -> Iterator[tuple[int, Case]]:
        """Yield the cases of the pools that have the most new combinations of properties, the pools taking turns.

        Each case comes with the number of its pool. It is chosen when it is asked for, after what was judged before.
        """
        chosen: set[Case] = set()
        for _ in range(_JUDGED_PER_POOL):
            for number, pool in enumerate(pools):
                if left := [case for case in pool if case not in self._right and case not in chosen]:
                    case = self._novelty.find_best(left)
                    self._novelty.add_case(case)
                    chosen.add(case)
                    yield number, case

    def _judge_chosen(self, chosen: Iterator[tuple[int, Case]]) -> Iterator[tuple[int, Case, list[Record]]]:
        """Judge chosen cases with all checks of the grid, and yield their records in the order of the cases.

        With a pool of processes, several cases are judged at once.
        """
        if self._pool is None:
            for number, case in chosen:
                self._raise_if_spent()
                yield number, case, self._runner.judge(Job(self._implementation, case, _GRID_CHECKS))
            return
        self._raise_if_spent()
        examples = self._budget.examples
        batch = list(itertools.islice(chosen, None if examples is None else examples - len(self._right)))
        judged: dict[Case, list[Record]] = {}

        def on_job(job: Job, found: list[Record]) -> None:
            judged[job.case] = found
            known = itertools.takewhile(lambda drawn: drawn[1] in judged, batch)
            if self._is_late() or any(_is_wrong(judged[case]) for _, case in known):
                raise _BatchDecided

        jobs = [Job(self._implementation, case, _GRID_CHECKS) for _, case in batch]
        with contextlib.suppress(_BatchDecided):
            judge_in_parallel(
                jobs, self._pool, self._kernels, on_job, self._runner.report_lost, one_by_one=True, exploring=True
            )
        for number, case in itertools.takewhile(lambda drawn: drawn[1] in judged, batch):
            yield number, case, judged[case]
        self._raise_if_spent()

    def _run_batch(self, strategy: _Strategy, seed: int, each: Callable[[Case], object]) -> None:
        """Run Hypothesis on one batch: call `each` with drawn cases, and shrink a case for which it raises."""
        if run_batch(strategy, seed, each, examples=_BATCH_EXAMPLES):
            self._shrunk = True

    def _raise_if_wrong(self, case: Case) -> None:
        """Raise `WrongCase` if a case is wrong.

        When a batch is drawn again, cases that come before the first wrong one are skipped.
        """
        self._shrinking = self._shrinking or case == self._first
        if not self._shrinking or case in self._right or case in self._right_smaller:
            return
        if case in self._wrong or self._judge_smaller(case):
            raise WrongCase

    def _add_drawn(self, case: Case, judged: list[Record]) -> bool:
        """Add a drawn case and its records to the result, and return whether the case is wrong."""
        wrong = _is_wrong(judged)
        if wrong:
            self._first = case
            self._found_at = time.monotonic()
        (self._wrong if wrong else self._right)[case] = judged
        self._on_case(JudgedCase(case, judged, shrinking=False))
        return wrong

    def _raise_if_spent(self) -> None:
        """Raise `OutOfTime` if no further case may be judged."""
        if self._is_budget_spent():
            raise OutOfTime

    def _is_budget_spent(self) -> bool:
        return self._is_late() or (self._budget.examples is not None and len(self._right) >= self._budget.examples)

    def _is_late(self) -> bool:
        seconds = self._budget.seconds
        return seconds is not None and time.monotonic() - self._started >= seconds

    def _judge_smaller(self, case: Case) -> bool:
        """Tell whether a smaller case fails the same check as the first wrong case.

        Failures of other checks do not count: by them, shrinking could wander to another bug.
        """
        since = self._started if self._budget.seconds is not None else self._found_at
        if time.monotonic() - since >= self._budget.shrink_seconds:
            raise OutOfTime
        judged = self._runner.judge(Job(self._implementation, case, (self._find_failed_check(),)))
        wrong = any(record.verdict in _WRONG for record in judged)
        if wrong:
            self._wrong[case] = judged
        else:
            self._right_smaller.add(case)
        self._on_case(JudgedCase(case, judged, shrinking=True))
        return wrong

    def _find_failed_check(self) -> Check:
        assert self._first is not None
        names = [record.check for record in self._wrong[self._first] if record.verdict in _WRONG]
        return next(check for check in _GRID_CHECKS if check.name in names)

    @property
    def _smallest(self) -> Case | None:
        return min(self._wrong, key=compute_plainness, default=None)

    def _judge_fully(self) -> None:
        """Run every check on the smallest wrong case. Shrinking ran only one check on it."""
        case = self._smallest
        if case is not None and case != self._first:
            judged = self._runner.judge(Job(self._implementation, case, _GRID_CHECKS))
            # A case that was wrong once and right once counts as wrong.
            if not any(record.verdict in _WRONG for record in judged):
                failed = self._find_failed_check().name
                judged = self._wrong[case] + [record for record in judged if record.check != failed]
            self._wrong[case] = judged

    def _build_result(self) -> Exploration:
        failing = self._smallest
        by_case = list(self._right.values())
        judged = [case for case, case_records in self._right.items() if _is_judged(case_records)]
        if failing is not None and self._first is not None:
            by_case.append(self._wrong[failing])
            judged.append(self._first)
        reached: collections.Counter[str] = collections.Counter()
        for case in judged:
            reached.update((*case.features, case.distribution))
        return Exploration(
            records=[record for case_records in by_case for record in case_records],
            failing=failing,
            first=self._first,
            judged=len(judged),
            unjudged=len(by_case) - len(judged),
            declined=len(self._declined),
            shrinks=len(self._wrong) + len(self._right_smaller) - (self._first is not None),
            shrunk=self._shrunk,
            reached=reached,
            code_numbers=self._code_numbers,
            used=tuple(sorted(self._novelty.used)),
            beyond=self._novelty.beyond,
            seconds=time.monotonic() - self._started,
            interrupted=self._interrupted,
        )


def run_batch(strategy: _Strategy, seed: int, each: Callable[[Case], object], *, examples: int) -> bool:
    """Run Hypothesis once: call `each` with drawn cases, and shrink a case for which it raises `WrongCase`.

    Returns:
      Whether a case was wrong.
    """

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        print_blob=False,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        suppress_health_check=list(hypothesis.HealthCheck),
        verbosity=hypothesis.Verbosity.quiet,
    )
    @hypothesis.given(strategy)
    def test_drawn_case(case: Case) -> None:
        each(case)

    try:
        test_drawn_case()
    except WrongCase:
        return True
    except hypothesis.errors.Unsatisfiable:
        pass  # nothing drawn was supported; the next batch may be luckier
    return False


@contextlib.contextmanager
def use_temporary_home() -> Iterator[None]:
    """Give Hypothesis a temporary folder for its files, so that it creates none in the current folder."""
    with use_temporary_folder("explorer") as folder:
        configuration.set_hypothesis_home_dir(folder.path)
        try:
            yield
        finally:
            configuration.set_hypothesis_home_dir(None)


def _is_wrong(judged: Sequence[Record]) -> bool:
    return any(record.verdict in _WRONG for record in judged)


def _is_judged(judged: Sequence[Record]) -> bool:
    return any(record.verdict in records.JUDGED for record in judged)
