"""Find out which checks see which planted bugs, and which bugs only one check sees.

`examine` judges the kernel with a planted bug on the cases of a run. A check *sees* the bug if one of its records is
red, that is, failed or raised. The first such record is the check's *detection*. `detection_table` saves them.
"""

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
from conformance.mutation.planted_bug import PlantedBug
from reports.records import ERROR, RED, Record

NEAREST_CASES = 2
"""Number of grid cases that are judged first: those that best match the bug's trigger."""
# If one check has seen a bug on the first jobs, only every fourth of the remaining cases is judged.
_STRIDE = 4


@dataclasses.dataclass(frozen=True)
class Detection:
    """The first red record of one check for a planted bug.

    Attributes:
      observable: the result that is wrong, as in the record.
      case: id of the case.
      verdict: verdict of the record, `"fail"` or `"error"`.
      ratio: the error in units of the bound; None if the record has no ratio.
    """

    observable: str
    case: str
    verdict: str
    ratio: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examination:
    """Result of judging one planted bug: which checks see it, and at what cost.

    Attributes:
      bug: name of the planted bug.
      family: `PlantedBug.family` of the bug.
      kind: `PlantedBug.kind` of the bug.
      reference: `PlantedBug.reference` of the bug.
      shows: `PlantedBug.shows` of the bug.
      detections: by name of a check that sees the bug, the check's first red record.
      judged: number of jobs (a case with its checks) that were judged.
      planned: number of jobs in a full run. Fewer jobs are judged if a check sees the bug early.
      seconds: time that each check took, by name of the check.
      first_red: seconds until a check saw the bug; None if no check did, or if the time was not saved.
    """

    bug: str
    family: str
    kind: str
    reference: str
    shows: tuple[str, ...]
    detections: Mapping[str, Detection]
    judged: int
    planned: int
    seconds: Mapping[str, float]
    first_red: float | None = None

    @property
    def survives(self) -> bool:
        """Whether no check sees the bug."""
        return not self.detections


def order_jobs_for_bug(bug: PlantedBug, level: str) -> list[Job]:
    """Order the jobs of a run so that some check sees the bug early.

    `NEAREST_CASES` cases of the grid come first. Then come jobs on cases outside the grid, in the order of `SCOPES`.
    The rest of the grid comes last. Within the grid, cases with the bug's trigger come first, and small cases come
    before large ones. The order saves time and changes no result. At level `smoke` the order of a user's run is kept,
    because there we measure how soon such a run turns red.
    """
    jobs = plan_run([bug.build()], level=level).jobs
    if level == "smoke":
        return list(jobs)
    on_grid = [job for job in jobs if job.is_on_grid]
    on_grid.sort(key=lambda job: (not bug.trigger(job.case), _compute_size(job.case)))
    special = [job for job in jobs if not job.is_on_grid]
    return [*on_grid[:NEAREST_CASES], *special, *on_grid[NEAREST_CASES:]]


def is_still_asked(bug: PlantedBug, level: str, detections: Mapping[str, Detection]) -> bool:
    """Check whether a run still contains one of the detections: the same check on the same case."""
    planned = {(check.name, job.case.id) for job in order_jobs_for_bug(bug, level) for check in job.checks}
    return any((check, detection.case) in planned for check, detection in detections.items())


def _compute_size(case: Case) -> int:
    """Return the number of logits of a case, B * N * T * S, as a measure of its cost."""
    return case.batch * case.num_q_heads * case.q_length * case.kv_length


def create_single_look_runner() -> Runner:
    """Create a runner that does not confirm failures by judging them a second time.

    A kernel with a planted bug is known to be wrong, so this saves a third of the time.
    """
    return Runner(Settings(), confirmed=0)


def iter_red_records(bug: PlantedBug, level: str, seen: Mapping[str, Detection] | None = None) -> Iterator[Record]:
    """Judge a planted bug, and yield its red records one by one, so that the caller can stop early.

    If `seen` is given, the checks in it run first, on the case of the earlier detection before other cases. Of these
    checks, only the subchecks that saw the bug run. After that, the whole run is judged as if nothing were known. So a
    bug that only other checks see is still found.

    Args:
      bug: the planted bug.
      level: the level of the grid of cases: `"smoke"`, `"quick"`, ...
      seen: by name of a check, the detection that an earlier examination recorded.
    """
    runner = create_single_look_runner()
    jobs = order_jobs_for_bug(bug, level)
    subchecks = {subcheck for one in (seen or {}).values() for subcheck in _iter_subcheck_names(one.observable)}
    for job in _select_seen_jobs(jobs, seen or {}):
        yield from _iter_red(runner.stream(job), subchecks)
    for job in jobs:
        yield from _iter_red(runner.stream(job), None)


def _iter_subcheck_names(observable: str) -> Iterator[str]:
    """Yield the names that the subcheck behind an observable may have: `dq.deep` and `deep` for `dq.deep`.

    A subcheck is a named part of a check. Its name is the observable's name, or that name without its first parts.
    """
    parts = observable.split(".")
    return (".".join(parts[first:]) for first in range(len(parts)))


def _iter_red(records: Iterator[Record], subchecks: Collection[str] | None) -> Iterator[Record]:
    """Yield the red records, while only the subchecks named in `subchecks` run; None runs all subchecks.

    The selection of subchecks is in force only while a record is computed. Between two records the caller may judge
    another kernel, which must not be restricted.
    """
    while True:
        with select_subchecks(subchecks):
            record = next(records, None)
        if record is None:
            return
        if record.verdict in RED:
            yield record


def _select_seen_jobs(jobs: Iterable[Job], seen: Mapping[str, Detection]) -> list[Job]:
    """Reduce jobs to the checks that saw the bug, and sort them so that the bug is seen again soon.

    Jobs without such a check are dropped. Cases on which one of the checks saw the bug come first. Jobs whose first
    check is early in `CHECKS` come before others, because early checks compile the fewest programs.

    Args:
      jobs: jobs of a run.
      seen: by name of a check that saw the bug, its detection.
    """
    cases = {detection.case for detection in seen.values()}
    with_seen_checks = [(job, tuple(check for check in job.checks if check.name in seen)) for job in jobs]
    narrowed = [dataclasses.replace(job, checks=checks) for job, checks in with_seen_checks if checks]
    return sorted(narrowed, key=lambda job: (job.case.id not in cases, CHECKS.index(job.checks[0])))


def examine(bug: PlantedBug, level: str) -> Examination:
    """Judge a planted bug, and find out which checks see it and on which case first.

    Jobs are judged in the order of `order_jobs_for_bug` until two checks have seen the bug. If only one check has seen
    it on the nearest cases and the cases outside the grid, a quarter of the remaining grid is judged. If no check has,
    the whole remaining grid is judged.
    """
    runner = create_single_look_runner()
    started = time.perf_counter()
    first_red = None
    jobs = order_jobs_for_bug(bug, level)
    near_or_off_grid = NEAREST_CASES + sum(not job.is_on_grid for job in jobs)
    detections: dict[str, Detection] = {}
    seconds: dict[str, float] = {}
    judged = 0
    for number, job in enumerate(jobs):
        if len(detections) > 1:
            break
        if level != "smoke" and number >= near_or_off_grid and detections and number % _STRIDE:
            continue
        open_checks = tuple(check for check in job.checks if check.name not in detections)
        for record in runner.stream(dataclasses.replace(job, checks=open_checks)):
            seconds[record.check] = seconds.get(record.check, 0.0) + record.seconds
            if record.verdict in RED and record.check not in detections:
                first_red = first_red or time.perf_counter() - started
                detections[record.check] = Detection(record.observable, record.case, record.verdict, record.ratio)
        judged += 1
    return Examination(
        bug=bug.name,
        family=bug.family,
        kind=bug.kind,
        reference=bug.reference,
        shows=bug.shows,
        detections=detections,
        judged=judged,
        planned=len(jobs),
        seconds=seconds,
        first_red=first_red,
    )


def shows_as_declared(bug: PlantedBug, red: Record) -> bool:
    """Check whether a red record is about an observable in which the bug should show (`PlantedBug.shows`).

    For a record with verdict `error`, `shows` must contain `"error"`.
    """
    if red.verdict == ERROR:
        return "error" in bug.shows
    return bool({red.observable, red.observable.partition(".")[0]} & set(bug.shows))


@dataclasses.dataclass(frozen=True)
class CheckPower:
    """The power of one check over a bank of planted bugs, and its cost.

    Attributes:
      check: name of the check.
      detected: number of bugs that the check sees.
      alone: names of the bugs that no other check sees.
      seconds: time that the check took for all bugs.
    """

    check: str
    detected: int
    alone: tuple[str, ...]
    seconds: float


def compute_check_powers(examined: Sequence[Examination]) -> list[CheckPower]:
    """Count for each check the bugs that it sees; checks are in the order in which they run."""
    return [
        CheckPower(
            check=check.name,
            detected=sum(check.name in e.detections for e in examined),
            alone=tuple(e.bug for e in examined if set(e.detections) == {check.name}),
            seconds=sum(e.seconds.get(check.name, 0.0) for e in examined),
        )
        for check in CHECKS
    ]
