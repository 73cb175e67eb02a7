"""Find out which checks see which planted bugs, and what each check contributes."""

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
"""Number of grid cases that come first: those nearest to a bug's trigger."""
# Of the rest of the grid, one case in so many is judged for a bug that a single check has seen.
_STRIDE = 4


@dataclasses.dataclass(frozen=True)
class Kill:
    """The first red record of a check for a bug."""

    observable: str
    case: str
    verdict: str
    ratio: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examination:
    """What the gate found out about one planted bug.

    Attributes:
      bug: its name; `family`, `kind`, `reference` and `shows` as planted.
      kills: for each check that sees the bug, its first kill.
      judged: number of jobs that were judged.
      planned: number of jobs in the plan. Fewer are judged if several checks see the bug on the nearest cases.
      seconds: time by check.
      first_red: seconds until a check saw it; None if none did, or if that was not kept.
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
    """Order the jobs of the gate so that a bug is seen early.

    `NEAREST_CASES` cases of the grid come first, then jobs beside the grid in the order of `SCOPES`, then the rest of
    the grid. In the grid, cases with the bug's trigger come first, small before large. The order saves time and changes
    no result. At `smoke` the order is that of a run, since how soon that turns red is measured.
    """
    jobs = plan_run([bug.build()], level=level).jobs
    if level == "smoke":
        return list(jobs)
    on_grid = [job for job in jobs if job.is_on_grid]
    on_grid.sort(key=lambda job: (not bug.trigger(job.case), _compute_size(job.case)))
    special = [job for job in jobs if not job.is_on_grid]
    return [*on_grid[:NEAREST_CASES], *special, *on_grid[NEAREST_CASES:]]


def is_still_asked(bug: PlantedBug, level: str, kills: Mapping[str, Kill]) -> bool:
    """Tell whether some check that saw the bug is still planned on the case on which it did."""
    planned = {(check.name, job.case.id) for job in order_jobs_for_bug(bug, level) for check in job.checks}
    return any((check, kill.case) in planned for check, kill in kills.items())


def _compute_size(case: Case) -> int:
    """Return the number of logits of a case."""
    return case.batch * case.num_q_heads * case.q_length * case.kv_length


def create_single_look_runner() -> Runner:
    """Create a runner that judges no failure again.

    A planted bug is known to be wrong, and this saves a third of the time.
    """
    return Runner(Settings(), confirmed=0)


def iter_red_records(bug: PlantedBug, level: str, seen: Mapping[str, Kill] | None = None) -> Iterator[Record]:
    """Yield red records as they come, so that the caller can stop once it has seen enough.

    `seen` has the kill of each check that saw the bug before. These checks run first, with only the questions that saw
    it and beginning with its case. Then everything is run as if nothing were known, so a bug that other checks see by
    now is still found.
    """
    runner = create_single_look_runner()
    jobs = order_jobs_for_bug(bug, level)
    questions = {question for kill in (seen or {}).values() for question in _iter_question_names(kill.observable)}
    for job in select_seen_jobs(jobs, seen or {}):
        yield from _iter_red(runner.stream(job), questions)
    for job in jobs:
        yield from _iter_red(runner.stream(job), None)


def _iter_question_names(observable: str) -> Iterator[str]:
    """Yield what may name the question that `observable` answers: `dq.deep` and `deep` for `dq.deep`."""
    parts = observable.split(".")
    return (".".join(parts[first:]) for first in range(len(parts)))


def _iter_red(records: Iterator[Record], questions: Collection[str] | None) -> Iterator[Record]:
    """Yield the red records, of all questions or of these.

    The limit to questions holds only while a record is made: the caller may judge something else meanwhile.
    """
    while True:
        with select_subchecks(questions):
            record = next(records, None)
        if record is None:
            return
        if record.verdict in RED:
            yield record


def select_seen_jobs(jobs: Iterable[Job], seen: Mapping[str, Kill]) -> list[Job]:
    """Return jobs reduced to checks that saw the bug; cases on which one saw it come first.

    Among these, jobs whose check is early in `CHECKS` come first: plain questions compile the fewest programs.
    """
    cases = {kill.case for kill in seen.values()}
    with_seen_checks = [(job, tuple(check for check in job.checks if check.name in seen)) for job in jobs]
    narrowed = [dataclasses.replace(job, checks=checks) for job, checks in with_seen_checks if checks]
    return sorted(narrowed, key=lambda job: (job.case.id not in cases, CHECKS.index(job.checks[0])))


def examine(bug: PlantedBug, level: str) -> Examination:
    """Find out which checks see a bug, and where first.

    Jobs are judged in the order of `order_jobs_for_bug` until two checks have seen the bug. If one check has seen it on
    the nearest cases and beside the grid, a quarter of the rest of the grid is judged. If none has, all of it is.
    """
    runner = create_single_look_runner()
    started = time.perf_counter()
    first_red = None
    jobs = order_jobs_for_bug(bug, level)
    near_or_off_grid = NEAREST_CASES + sum(not job.is_on_grid for job in jobs)
    kills: dict[str, Kill] = {}
    seconds: dict[str, float] = {}
    judged = 0
    for number, job in enumerate(jobs):
        if len(kills) > 1:
            break
        if level != "smoke" and number >= near_or_off_grid and kills and number % _STRIDE:
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
    """Tell whether a red record has an observable in which the bug should show. A crash counts as `"error"`."""
    if red.verdict == ERROR:
        return "error" in bug.shows
    return bool({red.observable, red.observable.partition(".")[0]} & set(bug.shows))


@dataclasses.dataclass(frozen=True)
class CheckPower:
    """What a check contributes: bugs that it sees, those that it alone sees, and its cost."""

    check: str
    kills: int
    alone: tuple[str, ...]
    seconds: float


def compute_check_powers(examined: Sequence[Examination]) -> list[CheckPower]:
    """Compute the contribution of each check, in the order in which checks run."""
    return [
        CheckPower(
            check=check.name,
            kills=sum(check.name in e.kills for e in examined),
            alone=tuple(e.bug for e in examined if set(e.kills) == {check.name}),
            seconds=sum(e.seconds.get(check.name, 0.0) for e in examined),
        )
        for check in CHECKS
    ]
