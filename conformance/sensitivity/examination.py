"""Which check sees which planted bug, and what a check is worth."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from cases.case import Case
from conformance.check_api.judgement import select_subchecks
from conformance.checks import CHECKS
from conformance.judging.job import Job
from conformance.judging.run_plan import plan_run
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from conformance.records import ERROR, RED, Record
from conformance.sensitivity.bank import PlantedBug

NEAREST_CASES = 2
"""Cases of the grid that come first: those nearest to a bug's trigger."""
# One case in so many of the rest of the grid, for a bug that one check alone has seen.
_STRIDE = 4


@dataclasses.dataclass(frozen=True)
class Kill:
    """The first red record that a check has for a bug."""

    observable: str
    case: str
    verdict: str
    ratio: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examination:
    """What the gate says of one planted bug.

    Attributes:
      bug: its name; `family`, `kind`, `reference` and `shows` as planted.
      kills: check to its first kill, for the checks that see the bug.
      judged: how many jobs of the plan were judged.
      planned: how many jobs the plan has. Fewer are judged where several checks see the bug on the cases nearest to it.
      seconds: time by check.
      first_red: seconds of judging until a check saw it; none where none does, or where that was not kept.
    """

    bug: str
    family: str
    kind: str
    reference: str
    shows: tuple[str, ...]
    kills: Mapping[str, Kill]
    judged: int
    planned: int
    seconds: Mapping[str, float]
    first_red: float | None = None

    @property
    def survives(self) -> bool:
        """Whether no check sees it."""
        return not self.kills


def order_jobs_for_bug(bug: PlantedBug, level: str) -> list[Job]:
    """The jobs of the gate for the bug's implementation: `NEAR` cases of the grid, what is not on it, the rest of it.

    Cases that have the bug's trigger come first, small before big; what is not on the grid comes in the order of
    `SCOPES`. All jobs are there: the order saves time and changes no result. At `smoke` the order is that of a
    run, since how soon that turns red is what is measured.
    """
    jobs = plan_run([bug.build()], level=level).jobs
    if level == "smoke":
        return list(jobs)
    on_grid = [job for job in jobs if job.is_on_grid]
    on_grid.sort(key=lambda job: (not bug.trigger(job.case), _compute_size(job.case)))
    special = [job for job in jobs if not job.is_on_grid]
    return [*on_grid[:NEAREST_CASES], *special, *on_grid[NEAREST_CASES:]]


def is_still_asked(bug: PlantedBug, level: str, kills: Mapping[str, Kill]) -> bool:
    """Whether some check that saw the bug is still asked of the case on which it did."""
    asked = {(check.name, job.case.id) for job in order_jobs_for_bug(bug, level) for check in job.checks}
    return any((check, kill.case) in asked for check, kill in kills.items())


def _compute_size(case: Case) -> int:
    return case.batch * case.num_q_heads * case.q_length * case.kv_length


def create_single_look_runner() -> Runner:
    """A failure of what is known to be wrong needs no second judgement, which costs a third of the time."""
    return Runner(Settings(), confirmed=0)


def iter_red_records(bug: PlantedBug, level: str, seen: Mapping[str, Kill] | None = None) -> Iterator[Record]:
    """The red records, as they come: whoever has seen enough stops.

    `seen` says which checks saw the bug before, where, and by which of their questions. Those are asked first, alone
    and beginning there; then everything is asked as if nothing were known, so that a bug that others see now is found
    all the same.
    """
    runner = create_single_look_runner()
    jobs = order_jobs_for_bug(bug, level)
    questions = {question for kill in (seen or {}).values() for question in _iter_question_names(kill.observable)}
    for job in select_seen_jobs(jobs, seen or {}):
        yield from _iter_red(runner.stream(job), questions)
    for job in jobs:
        yield from _iter_red(runner.stream(job), None)


def _iter_question_names(observable: str) -> Iterator[str]:
    """What may name the question that `observable` answers, one told apart from others: `deep` in `dq.deep`."""
    parts = observable.split(".")
    return (".".join(parts[first:]) for first in range(len(parts)))


def _iter_red(records: Iterator[Record], questions: Collection[str] | None) -> Iterator[Record]:
    """The red ones, of all questions or of these; whoever takes them may ask something else meanwhile."""
    while True:
        with select_subchecks(questions):
            record = next(records, None)
        if record is None:
            return
        if record.verdict in RED:
            yield record


def select_seen_jobs(jobs: Iterable[Job], seen: Mapping[str, Kill]) -> list[Job]:
    """The jobs with a check that saw the bug, with no other check, those on a case where one saw it first.

    Of these the ones whose check comes first in `CHECKS` are first: plain questions, which take the fewest programs.
    """
    cases = {kill.case for kill in seen.values()}
    asked = [(job, tuple(check for check in job.checks if check.name in seen)) for job in jobs]
    narrowed = [dataclasses.replace(job, checks=checks) for job, checks in asked if checks]
    return sorted(narrowed, key=lambda job: (job.case.id not in cases, CHECKS.index(job.checks[0])))


def examine(bug: PlantedBug, level: str) -> Examination:
    """Which checks see a bug, and where first.

    Jobs are judged in the order of `ordered_jobs` until two checks have seen the bug. One that a single check has seen
    on the nearest cases and on all that is not on the grid is shown to a quarter of the rest of the grid, and one that
    none has seen to all of it.
    """
    runner = create_single_look_runner()
    started = time.perf_counter()
    first_red = None
    jobs = order_jobs_for_bug(bug, level)
    beside = NEAREST_CASES + sum(not job.is_on_grid for job in jobs)
    kills: dict[str, Kill] = {}
    seconds: dict[str, float] = {}
    judged = 0
    for number, job in enumerate(jobs):
        if len(kills) > 1:
            break
        if level != "smoke" and number >= beside and kills and number % _STRIDE:
            continue
        open_checks = tuple(check for check in job.checks if check.name not in kills)
        for record in runner.stream(dataclasses.replace(job, checks=open_checks)):
            seconds[record.check] = seconds.get(record.check, 0.0) + record.seconds
            if record.verdict in RED and record.check not in kills:
                first_red = first_red or time.perf_counter() - started
                kills[record.check] = Kill(record.observable, record.case, record.verdict, record.ratio)
        judged += 1
    return Examination(
        bug=bug.name,
        family=bug.family,
        kind=bug.kind,
        reference=bug.reference,
        shows=bug.shows,
        kills=kills,
        judged=judged,
        planned=len(jobs),
        seconds=seconds,
        first_red=first_red,
    )


def shows_as_declared(bug: PlantedBug, red: Record) -> bool:
    """Whether a red record is of an observable by which the bug should show; a crash counts as `"error"`."""
    if red.verdict == ERROR:
        return "error" in bug.shows
    return bool({red.observable, red.observable.partition(".")[0]} & set(bug.shows))


@dataclasses.dataclass(frozen=True)
class CheckPower:
    """What a check is worth: bugs it sees, bugs that no other check sees, and what it cost to find out."""

    check: str
    kills: int
    alone: tuple[str, ...]
    seconds: float


def compute_check_powers(examined: Sequence[Examination]) -> list[CheckPower]:
    """The power of each check, in the order in which checks run."""
    return [
        CheckPower(
            check=check.name,
            kills=sum(check.name in e.kills for e in examined),
            alone=tuple(e.bug for e in examined if set(e.kills) == {check.name}),
            seconds=sum(e.seconds.get(check.name, 0.0) for e in examined),
        )
        for check in CHECKS
    ]
