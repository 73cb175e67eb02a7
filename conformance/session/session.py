"""Run a session: resolve the options, plan the jobs, judge them, follow up on findings, and finish.

The command line, the pytest gate and Python callers go through the same five functions, over plain data:

1. `resolve_run(spec)` checks files, loads settings and finds the implementations: a `ResolvedRun`.
2. `plan_jobs(resolved)` plans the jobs: a `PlannedRun`. `load_resumed` takes over those that a file has.
3. `open_journal` opens the files of records, and `judge_jobs` judges. pytest, which has a loop of its own, does both
   job by job.
4. `follow_up_run` confirms the findings and compares failing kernels with planted bugs.
5. `finish_run` adds the records of the run as a whole and closes the files: a `SessionResult`.
"""

from __future__ import annotations

import contextlib

from conformance import interrupts
from conformance.judging.journal import JournalWriteError
from conformance.sandbox import kernel_process
from conformance.session.failures import CannotJudge
from conformance.session.job_judging import (
    Say,
    ShowProgress,
    judge_jobs,
    open_journal,
    say_nothing,
    show_no_progress,
)
from conformance.session.planned_run import PlannedRun, load_resumed, plan_jobs
from conformance.session.process_setup import prepare_process
from conformance.session.resolved_run import COMMAND_LINE, Caller, resolve_run
from conformance.session.run_result import (
    FollowedUp,
    SessionResult,
    abandon,
    compare_with_baseline,
    finish_run,
    follow_up_run,
)
from conformance.session.run_spec import RunSpec
from reports.records import COMPLETE, FAILED


def plan_session(spec: RunSpec, caller: Caller = COMMAND_LINE) -> PlannedRun:
    """Resolve the options of a run, plan its jobs, and take over those of a resumed file.

    Raises:
      CannotJudge: if the run is not possible; the message is one line.
    """
    resolved = resolve_run(spec, caller)
    try:
        return load_resumed(plan_jobs(resolved))
    except CannotJudge:
        if resolved.remote is not None:
            resolved.remote.close()
        raise


def run_planned(
    planned: PlannedRun, show_progress: ShowProgress = show_no_progress, say: Say = say_nothing
) -> SessionResult:
    """Judge all jobs, follow up on findings, and write all files.

    A signal stops judging. The records until then are reported.

    Raises:
      CannotJudge: if a file cannot be written.
    """
    interrupts.stop_raising()
    followed, remote = FollowedUp(), planned.resolved.remote
    with contextlib.ExitStack() as connection:
        if remote is not None:
            connection.callback(remote.close)
        try:
            journal = open_journal(planned)
        except JournalWriteError as error:
            raise CannotJudge(str(error)) from error
        try:
            how, reason = judge_jobs(planned, journal, show_progress)
            connection.close()
            if how == COMPLETE:
                followed = follow_up_run(planned, journal, say)
        except JournalWriteError as error:
            how, reason = FAILED, abandon(journal, error)
        except Exception as error:  # a bug of this program: keep the records so far, and write the reason into the file
            with contextlib.suppress(JournalWriteError):
                journal.end(FAILED, reason=f"{type(error).__name__}: {error}")
            raise
    result = finish_run(planned, journal, how, reason, followed)
    planned.resolved.outputs.write(result.summary)
    return result


def run_session(
    spec: RunSpec,
    caller: Caller = COMMAND_LINE,
    *,
    show_progress: ShowProgress = show_no_progress,
    say: Say = say_nothing,
) -> SessionResult:
    """Run a whole session in this process, and end the kernels' processes.

    Args:
      spec: the options of the run.
      caller: what the caller sets besides them, such as the implementations or an executor.
      show_progress: opens a display of the run's progress.
      say: called with lines for the user while the session goes on.

    Raises:
      CannotJudge: if the run is not possible; the message is one line.
    """
    prepare_process()
    with interrupts.record_signals():
        try:
            with interrupts.raise_on_signal():
                planned = plan_session(spec, caller)
            return compare_with_baseline(planned.resolved, run_planned(planned, show_progress, say))
        finally:
            kernel_process.end_all_processes()
