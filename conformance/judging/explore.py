"""Exploring beyond the grid: cases drawn from the whole case space until one is wrong, then shrunk to the least one.

Hypothesis draws and shrinks. Judging a case costs a second or so, nearly all of it compilation, which is four orders of
magnitude more than Hypothesis reckons with. Hence three liberties: it is run in small batches, within which it neither
repeats nor mutates what it has drawn; a case that was judged before is not judged again; and while it shrinks, only the
check that failed is asked.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import hypothesis
from hypothesis import configuration

from cases.case import Case, matches
from cases.operands import REMOVABLE
from cases.space import NothingToDraw
from cases.strategies import cases
from conformance import records
from conformance.asking.scopes import GRID
from conformance.checks import CHECKS, Check
from conformance.contract import Implementation
from conformance.judging.plan import Job
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from conformance.records import Record

_CI_EXAMPLES = 50
_EXPLORE_SECONDS = 60.0
_GRACE = 30.0
"""Seconds that shrinking may go on beyond the time budget; half the budget if that is more."""
_UNLIMITED_SHRINK = 120.0
"""Seconds for shrinking where there is no time budget."""

# Below ten examples Hypothesis spends none on small variations of what it has drawn.
_BATCH = 9
_FRUITLESS_BATCHES = 5  # so many batches with no new case, and the space is taken to be exhausted

__all__ = ["Budget", "Exploration", "NothingToDraw", "Seen", "budget", "explore", "plainness", "told"]

_GRID_CHECKS = tuple(check for check in CHECKS if check.scope is GRID)
_WRONG = frozenset({records.FAIL, records.ERROR})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """When to stop, and with which seed to start.

    Attributes:
      seconds: for drawing and judging; none for no limit. A case that is under way is finished.
      examples: how many cases to judge at most; none for no limit.
      seed: the same seed draws the same cases with the same version of Hypothesis and the same kernel (Hypothesis looks
        for constants worth trying in the source of what it tests).
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
        """Seconds after which shrinking stops, from the start if there is a time budget, else from the find."""
        return _UNLIMITED_SHRINK if self.seconds is None else self.seconds + max(_GRACE, self.seconds / 2)


def budget(
    profile: Literal["ci", "explore"],
    *,
    seconds: float | None = None,
    examples: int | None = None,
    seed: int | None = None,
) -> Budget:
    """The budget of a profile, with what is given put in its place.

    `ci` judges a fixed number of cases from seed 0, the same ones every time; `explore` goes on for a time from a seed
    that is drawn.

    Raises:
      ValueError: for a limit that is not positive.
    """
    if profile == "ci":
        return Budget(seconds=seconds, examples=_CI_EXAMPLES if examples is None else examples, seed=seed or 0)
    drawn = random.SystemRandom().getrandbits(32) if seed is None else seed
    return Budget(seconds=_EXPLORE_SECONDS if seconds is None else seconds, examples=examples, seed=drawn)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exploration:
    """What was found, and how far the exploration got.

    Attributes:
      records: of every case judged while drawing that was not wrong, and of the smallest wrong one.
      failing: the smallest wrong case, or none.
      first: the wrong case as it was drawn.
      judged: how many cases were judged while drawing.
      unjudged: how many do not discriminate, or could not be judged by any check.
      declined: how many cases were drawn that the implementation does not support.
      shrinks: cases judged to shrink the first one.
      shrunk: whether shrinking ran to its end.
      reached: how many judged cases had each feature, value distribution and phase.
      seconds: duration.
      interrupted: whether it was stopped by hand.
    """

    records: list[Record]
    failing: Case | None
    first: Case | None
    judged: int
    unjudged: int
    declined: int
    shrinks: int
    shrunk: bool
    reached: collections.Counter[str]
    seconds: float
    interrupted: bool


@dataclasses.dataclass(frozen=True)
class Seen:
    """What an exploration tells while it goes on: a judged case, and whether it was met while shrinking."""

    case: Case
    records: Sequence[Record]
    shrinking: bool


class _OutOfTime(BaseException):
    """Ends a run of Hypothesis from inside. No `Exception`, which Hypothesis would take for a failing example."""


class _Wrong(Exception):  # noqa: N818 -- a statement about the case
    """The case is wrong: what Hypothesis shrinks."""


def explore(
    implementation: Implementation,
    settings: Settings,
    budget: Budget,
    *,
    query: str | None = None,
    on_case: Callable[[Seen], None] = lambda seen: None,
) -> Exploration:
    """Draw cases that `implementation` supports and judge them, until one is wrong or the budget is spent.

    Args:
      implementation: what to judge.
      settings: tolerances and expected failures; a case that passes where a failure is expected is no find.
      budget: when to stop.
      query: only cases that it matches.
      on_case: hears of each judged case.

    Raises:
      cases.space.NothingToDraw: if no plain case is supported and matches.
    """
    return _Explorer(implementation, settings, budget, query, on_case).run()


class _Explorer:
    def __init__(
        self,
        implementation: Implementation,
        settings: Settings,
        budget: Budget,
        query: str | None,
        on_case: Callable[[Seen], None],
    ) -> None:
        lenient = tuple(dataclasses.replace(entry, some=True) for entry in settings.expected_failures)
        # Each failure is confirmed: one that the compiler's flags make must not be what is shrunk.
        self._runner = Runner(dataclasses.replace(settings, expected_failures=lenient), confirmed=math.inf)
        self._implementation = implementation
        self._budget = budget
        self._query = query
        self._on_case = on_case
        self._started = time.monotonic()
        self._held: dict[Case, list[Record]] = {}
        self._wrong: dict[Case, list[Record]] = {}
        self._clean: set[Case] = set()  # met while shrinking, and right
        self._first: Case | None = None
        self._found_at = 0.0
        self._declined: set[Case] = set()
        self._shrunk = self._interrupted = False

    def run(self) -> Exploration:
        with _no_traces():
            return self._run()

    def _run(self) -> Exploration:
        try:
            with contextlib.suppress(_OutOfTime):
                strategy = cases(self._supports)
                self._declined.clear()  # what was asked to narrow the space was not drawn
                self._draw(strategy)
            self._judge_fully()
        except KeyboardInterrupt:
            self._interrupted = True
        return self._result()

    def _supports(self, case: Case) -> str | None:
        if self._first is None and self._late():  # here too, for a query that nothing drawn ever matches
            raise _OutOfTime
        if self._query is not None and not matches(self._query, case.id):
            return f"does not match {self._query}"
        reason = self._implementation.supports(case)
        if reason is not None:
            self._declined.add(case)
        return reason

    def _draw(self, strategy: hypothesis.strategies.SearchStrategy[Case]) -> None:
        seeds = random.Random(self._budget.seed)
        fruitless = 0
        while self._first is None and fruitless < _FRUITLESS_BATCHES:
            before = len(self._held)
            self._batch(strategy, seeds.getrandbits(64))
            fruitless = fruitless + 1 if len(self._held) == before else 0

    def _batch(self, strategy: hypothesis.strategies.SearchStrategy[Case], seed: int) -> None:
        """One run of Hypothesis: some draws, and if one of them is wrong, its shrinking."""

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=_BATCH,
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            print_blob=False,
            phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
            suppress_health_check=list(hypothesis.HealthCheck),
            verbosity=hypothesis.Verbosity.quiet,
        )
        @hypothesis.given(strategy)
        def each(case: Case) -> None:
            if self._is_wrong(case):
                raise _Wrong

        try:
            each()
        except _Wrong:
            self._shrunk = True
        except hypothesis.errors.Unsatisfiable:
            pass  # nothing drawn was supported; the next batch may do better

    def _is_wrong(self, case: Case) -> bool:
        if case in self._wrong:
            return True
        if case in self._held or case in self._clean:
            return False
        if self._first is None:
            return self._judge_drawn(case)
        return self._judge_smaller(case)

    def _judge_drawn(self, case: Case) -> bool:
        if self._spent():
            raise _OutOfTime
        found = self._runner.judge(Job(self._implementation, case, _GRID_CHECKS))
        wrong = any(record.verdict in _WRONG for record in found)
        if wrong:
            self._first = case
            self._found_at = time.monotonic()
        (self._wrong if wrong else self._held)[case] = found
        self._on_case(Seen(case, found, shrinking=False))
        return wrong

    def _spent(self) -> bool:
        return self._late() or (self._budget.examples is not None and len(self._held) >= self._budget.examples)

    def _late(self) -> bool:
        seconds = self._budget.seconds
        return seconds is not None and time.monotonic() - self._started >= seconds

    def _judge_smaller(self, case: Case) -> bool:
        """Whether the case fails the check that the first one failed: shrinking must not wander to another bug."""
        since = self._started if self._budget.seconds is not None else self._found_at
        if time.monotonic() - since >= self._budget.shrink_seconds:
            raise _OutOfTime
        found = self._runner.judge(Job(self._implementation, case, (self._failed_check(),)))
        wrong = any(record.verdict in _WRONG for record in found)
        if wrong:
            self._wrong[case] = found
        else:
            self._clean.add(case)
        self._on_case(Seen(case, found, shrinking=True))
        return wrong

    def _failed_check(self) -> Check:
        assert self._first is not None
        names = [record.check for record in self._wrong[self._first] if record.verdict in _WRONG]
        return next(check for check in _GRID_CHECKS if check.name in names)

    @property
    def _smallest(self) -> Case | None:
        return min(self._wrong, key=plainness, default=None)

    def _judge_fully(self) -> None:
        """Ask every check of the smallest wrong case, which has been asked one."""
        case = self._smallest
        if case is not None and case != self._first:
            self._wrong[case] = self._runner.judge(Job(self._implementation, case, _GRID_CHECKS))

    def _result(self) -> Exploration:
        failing = self._smallest
        shown = list(self._held.values())
        judged = [case for case, found in self._held.items() if _is_judged(found)]
        if failing is not None and self._first is not None:
            shown.append(self._wrong[failing])
            judged.append(self._first)
        reached: collections.Counter[str] = collections.Counter()
        for case in judged:
            reached.update((*case.features, case.distribution))
        return Exploration(
            records=[record for found in shown for record in found],
            failing=failing,
            first=self._first,
            judged=len(judged),
            unjudged=len(shown) - len(judged),
            declined=len(self._declined),
            shrinks=len(self._wrong) + len(self._clean) - (self._first is not None),
            shrunk=self._shrunk,
            reached=reached,
            seconds=time.monotonic() - self._started,
            interrupted=self._interrupted,
        )


@contextlib.contextmanager
def _no_traces() -> Iterator[None]:
    """Keeps Hypothesis from leaving a folder where the user happens to be."""
    with tempfile.TemporaryDirectory() as folder:
        configuration.set_hypothesis_home_dir(folder)
        try:
            yield
        finally:
            configuration.set_hypothesis_home_dir(None)


def _is_judged(found: Sequence[Record]) -> bool:
    return any(record.verdict in records.JUDGED for record in found)


def plainness(case: Case) -> tuple[int, int, int, str]:
    """Sorts cases, the plainest first: by how many things are out of the ordinary, then by size."""
    odd = (
        case.phase != "train",
        case.dtype != "f32",
        case.num_q_heads != case.num_kv_heads,
        case.q_length != case.kv_length,
        case.head_dim != case.v_head_dim,
        *(getattr(case, operand.field) != operand.absent for operand in REMOVABLE),
        case.distribution != "normal",
    )
    terms = 0 if case.mask == "full" else 1 + case.mask.count("_and_") + case.mask.count("_or_")
    size = case.batch * case.num_q_heads * (case.q_length + case.kv_length) * (case.head_dim + case.v_head_dim)
    return sum(odd) + terms, size, len(case.id), case.id


def told(found: Exploration, budget: Budget) -> list[str]:
    """What a person should know of an exploration, beside its records: one line each."""
    lines = [
        f"explored {found.judged} cases in {found.seconds:.0f} s from seed {budget.seed}; "
        f"{found.unjudged} more could not tell right from wrong, {found.declined} drawn ones are not supported",
        f"reached {', '.join(f'{name} {count}' for name, count in found.reached.most_common()) or 'nothing'}",
    ]
    if found.failing is not None:
        stopped = "" if found.shrunk else ", stopped before the end"
        lines.append(f"wrong as drawn: {found.first}")
        lines.append(f"smallest found: {found.failing} ({found.shrinks} others tried{stopped})")
    return lines
