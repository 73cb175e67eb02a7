"""Judge the jobs of a run, and write their records to its files as they come."""

from __future__ import annotations

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
    if fail_fast:
        waiting.sort(key=lambda job: not job.short)  # short jobs first, so that a failure shows sooner
    ends = find_early_ends(planned, planned.finished)
    try:
        with interrupts.raise_on_signal(), show_progress(len(planned.jobs), finished) as progress:
            interrupts.raise_if_stopped()

            def on_job(job: Job, judged: list[Record]) -> None:
                journal.add_job(numbers[id(job)], judged)
                progress.advance(judged)
                is_last = ends.add(job, judged)
                if fail_fast and any(record.verdict in RED for record in judged):
                    raise RunStopped(FIRST_FAILURE)
                if is_last:
                    raise _KernelEnded

            while waiting := [job for job in waiting if not ends.has_ended(job)]:
                try:
                    _judge_waiting(planned, waiting, on_job)
                    break
                except _KernelEnded:
                    done = journal.recorded.done
                    waiting = [job for job in waiting if numbers[id(job)] not in done]
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
