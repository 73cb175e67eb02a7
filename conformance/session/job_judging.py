"""Judge the jobs of a run, and write their records to its files as they come."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

from conformance import interrupts
from conformance.execution.implementation_registry import ImplementationNotFound
from conformance.judging.early_end import EarlyEnds
from conformance.judging.job import Job
from conformance.judging.journal import Journal
from conformance.judging.parallel_judging import judge_in_parallel
from conformance.judging.prioritization import split_to_fail_fast
from conformance.judging.remote_call import WorkerMismatch
from conformance.judging.task_pools import ExecutorFailed, LocalPool
from conformance.session.failures import RunStopped
from conformance.session.planned_run import PlannedRun, count_workers
from conformance.session.resolved_run import create_runner
from reports.records import COMPLETE, FAILED, INTERRUPTED, RED, Record, Run

FIRST_FAILURE = "stopped at the first failure, as --fail-fast says"


class ProgressDisplay(Protocol):
    """A display of a run's progress, which the caller provides."""

    def advance(self, judged: Sequence[Record]) -> None:
        """Count one more job, with its records. Raise `RunStopped` to stop the run."""


ShowProgress: TypeAlias = Callable[[int, Sequence[Sequence[Record]]], AbstractContextManager[ProgressDisplay]]
"""A function that opens a progress display, given the number of all jobs and the records of finished jobs."""
Say: TypeAlias = Callable[[str], None]
"""A function that shows the user one line of text."""


class _KernelEnded(Exception):
    """Raised after a job with which the jobs of its kernel end early, to judge on without the others."""


class _PartsOfJobs:
    """The parts of jobs that are still to judge, and the records of unfinished jobs."""

    def __init__(self, parts: Sequence[tuple[Job, Job]]) -> None:
        """Begin with pairs of a part and its job."""
        self._jobs = {id(part): job for part, job in parts}
        self._waiting = {id(part): part for part, _ in parts}
        self._left = collections.Counter(id(job) for _, job in parts)
        self._found: dict[int, list[Record]] = {}

    @property
    def waiting(self) -> list[Job]:
        """The parts that are not judged yet, in their order."""
        return list(self._waiting.values())

    def add(self, part: Job, judged: Sequence[Record]) -> tuple[Job, list[Record]]:
        """Add a judged part. Return its job, and the records of all judged parts of the job."""
        job = self._jobs[id(part)]
        del self._waiting[id(part)]
        self._left[id(job)] -= 1
        found = self._found.setdefault(id(job), [])
        found += judged
        return job, found

    def have_finished(self, job: Job) -> bool:
        """Return whether all parts of a job are judged."""
        return not self._left[id(job)]


class _NoDisplay:
    """A progress display that shows nothing."""

    def advance(self, judged: Sequence[Record]) -> None:
        """Do nothing."""


@contextlib.contextmanager
def show_no_progress(total: int, finished: Sequence[Sequence[Record]]) -> Iterator[ProgressDisplay]:
    """Open a progress display that shows nothing."""
    yield _NoDisplay()


def say_nothing(line: str) -> None:
    """Do not show the user this line."""


def open_journal(planned: PlannedRun, run: Run | None = None, *, started: float | None = None) -> Journal:
    """Open the files of records. Raises `JournalWriteError` if one cannot be written.

    Args:
      planned: the run.
      run: the run record, if another process judges.
      started: the time of `time.perf_counter` when that process began.
    """
    began = planned.resolved.started if started is None else started
    return Journal(planned.resolved.journals, run or planned.run, planned.finished, started=began)


def judge_jobs(
    planned: PlannedRun, journal: Journal, show_progress: ShowProgress = show_no_progress
) -> tuple[str, str]:
    """Judge and record all jobs, except those that the resumed file has, and those of kernels that end early.

    Returns:
      How the run ended (`complete`, `interrupted` or `failed`), and why unless it is complete.
    """
    numbers, waiting = planned.numbers, planned.waiting
    finished = [planned.finished[number] for job in planned.jobs if (number := numbers[id(job)]) in planned.finished]
    fail_fast = planned.resolved.spec.fail_fast
    # Each part of a job, with the job: the jobs themselves, unless the first failure is to show soon.
    waiting_parts = split_to_fail_fast(waiting) if fail_fast else [(job, job) for job in waiting]
    parts = _PartsOfJobs(waiting_parts)
    ends = find_early_ends(planned, planned.finished)
    try:
        with interrupts.raise_on_signal(), show_progress(len(planned.jobs), finished) as progress:
            interrupts.raise_if_stopped()

            def on_part(part: Job, judged: list[Record]) -> None:
                job, found = parts.add(part, judged)
                stops, is_last = fail_fast and any(record.verdict in RED for record in judged), False
                if parts.have_finished(job):
                    journal.add_job(numbers[id(job)], found)
                    is_last = ends.add(job, found)
                elif stops:
                    journal.add_records(found)  # those of an unfinished job, which `--resume` judges again
                if stops or parts.have_finished(job):
                    progress.advance(found)
                if stops:
                    raise RunStopped(FIRST_FAILURE)
                if is_last:
                    raise _KernelEnded

            while left := [part for part in parts.waiting if not ends.has_ended(part)]:
                try:
                    _judge_waiting(planned, left, on_part)
                    break
                except _KernelEnded:
                    pass
    except RunStopped as error:
        return INTERRUPTED, str(error)
    # A worker may fail to load a kernel.
    except (ImplementationNotFound, ExecutorFailed, WorkerMismatch) as error:
        return FAILED, str(error)
    except KeyboardInterrupt:
        return INTERRUPTED, interrupts.describe_signal()
    done = journal.recorded.done
    if missing := sum(numbers[id(job)] not in done and not ends.has_ended(job) for job in planned.jobs):
        return FAILED, f"{missing:,} of its jobs have no records"
    return COMPLETE, ""


def find_early_ends(planned: PlannedRun, done: Mapping[int, Sequence[Record]]) -> EarlyEnds:
    """Return the kernels whose jobs end early by the jobs that are done, whose records are given by their numbers."""
    ends = EarlyEnds(planned.jobs, is_enabled=planned.resolved.spec.may_end_early)
    for number, found in done.items():
        ends.add(planned.plan.jobs[number], found)
    return ends


def _judge_waiting(planned: PlannedRun, jobs: Sequence[Job], on_job: Callable[[Job, list[Record]], None]) -> None:
    resolved = planned.resolved
    runner = create_runner(resolved)
    if resolved.remote is not None:
        pool = resolved.remote.pool
    else:
        workers = count_workers(planned, len(jobs))
        if workers == 1:
            runner.run(jobs, on_job)
            return
        pool = LocalPool(workers)
    fail_fast = resolved.spec.fail_fast
    judge_in_parallel(jobs, pool, resolved.kernels, on_job, runner.report_lost, one_by_one=fail_fast)
