"""Run a session: plan a run, judge its jobs, record the judgements and report them.

The command line, the pytest gate and Python callers all use `Session`. It goes through these steps:

1. `Session(options)` checks that files can be written, finds the implementations and plans the jobs.
2. `begin` opens the files of records.
3. `judge_jobs` judges all jobs. A caller with a loop of its own, such as pytest, calls `judge` and `record` instead.
4. `follow_up` confirms the findings and compares failing kernels with planted bugs.
5. `finish` adds the records of the run as a whole and closes the files; `write_outputs` writes page and summary.
6. `compare_with_baseline` finds the regressions since another run.

`run_to_end` does steps 2 to 5, and `run_session` does all of them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, TypeAlias

import jax
import msgspec

from cases.name_suggestions import suggest_name, suggest_query
from conformance import interrupts
from conformance.check_api.scopes import ImplementationGrids
from conformance.check_api.subchecks import ALL_SUBCHECKS, Subchecks
from conformance.checks import CHECKS, CHECKS_BY_NAME, Check
from conformance.execution import implementation_registry
from conformance.follow_up import bug_diagnosis, follow_up
from conformance.judging import flag_share, provenance, run_plan
from conformance.judging.job import Job
from conformance.judging.journal import (
    Journal,
    JournalWriteError,
    ResumeMismatchError,
    describe_resumed_jobs,
    load_resumed_run,
)
from conformance.judging.parallel_judging import judge_in_parallel
from conformance.judging.rejudgement import ENOUGH_CONFIRMED
from conformance.judging.remote_call import WorkerMismatch
from conformance.judging.run_aggregation import aggregate_runs
from conformance.judging.run_levels import get_grid_level
from conformance.judging.run_plan import Plan
from conformance.judging.runner import Runner, build_changed_file_records, build_hardware_records
from conformance.judging.task_pools import ExecutorFailed, LocalPool
from conformance.sandbox import kernel_process
from conformance.sandbox.sandboxed_executor import collect_handshakes
from conformance.sensitivity import detection_table
from conformance.session.failures import CannotJudge, RunStopped, choose_exit_code
from conformance.session.input_files import parse_input_path
from conformance.session.process_setup import prepare_process
from conformance.session.project_lookup import (
    build_kernel_options,
    find_implementations,
    load_project_settings,
    parse_case,
    select_problem_cases,
)
from conformance.session.remote_pools import RemotePool, open_pool
from conformance.session.required_platform import select_native
from conformance.session.run_comparison import compare_runs, gather_compared_runs, read_compared_runs
from conformance.session.run_outputs import check_outputs, check_writable, find_step_summary
from conformance.session.run_spec import RunSpec
from conformance.temporary_folders import remove_abandoned_folders
from impls.contract.implementation import Implementation
from reports import conformity, text_format
from reports.causes.finding_text import FindingText
from reports.changes import Comparison
from reports.page_model import Summary, build_summary, spell_diagnose_option
from reports.records import COMPLETE, FAILED, INTERRUPTED, JUDGED, RED, Record, RecordedRun, Run, RunInfo, read_runs

FIRST_FAILURE = "stopped at the first failure, as --fail-fast says"
_START_SECONDS, _CHECK_SECONDS = 5.0, 0.05
"""Processor seconds to start, and for a check of a case of a plain function on a CPU; only a guess is made from them.

They are those of level `quick` on the machine where the loop below took `_LOOP_SECONDS`.
"""
_LOOP_STEPS, _LOOP_SECONDS = 200_000, 0.009
"""An empty loop of Python that tells how fast a machine is, and its processor time where checks were timed."""
_FEW_JOBS = 8
"""Runs with at most this number of jobs use one process: they are done before worker processes would have started."""
# The most workers on each JAX backend. Compiling takes most of the time and runs on the CPU, so several processes share
# a GPU. A TPU can be used by one process only.
_MAX_WORKERS = {"cpu": sys.maxsize, "gpu": 8}


class ProgressDisplay(Protocol):
    """A display of a run's progress, which the caller of a session provides."""

    def advance(self, judged: Sequence[Record]) -> None:
        """Count one more job, with its records. Raise `RunStopped` to stop the run."""


ShowProgress: TypeAlias = Callable[[int, Sequence[Sequence[Record]]], AbstractContextManager[ProgressDisplay]]
"""A function that opens a progress display, given the number of all jobs and the records of finished jobs."""
Say: TypeAlias = Callable[[str], None]
"""A function that shows the user one line of text."""


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionResult:
    """The result of a session: its records, its reports and its exit code.

    Attributes:
      how: how the run ended, `complete`, `interrupted` or `failed`.
      reason: why the run was interrupted or failed; otherwise empty.
      recorded: the run as it is stored in its file.
      records: the records of the run, one for each judged result.
      info: the facts that a report shows besides the records, such as coverage and environment.
      summary: the content that all reports of the run show.
      stale: red records of expected failures that no longer fail.
      flag_excess: failures of kernels of which too many passes depend on compiler flags (`judging.flag_share`).
      shrunk: lines of text that describe the smallest failing case of each finding.
      lacks_platform: whether nothing was judged on the required platform.
      exit_code: 0 if every implementation conforms, 1 if one does not, 2 if the run could not judge. A run that a
        signal stopped has 128 plus the number of the signal.
      comparison: what changed since the baseline; None without a baseline.
    """

    how: str
    reason: str
    recorded: RecordedRun
    records: Sequence[Record]
    info: RunInfo
    summary: Summary
    stale: Sequence[Record] = ()
    flag_excess: Sequence[Record] = ()
    shrunk: Sequence[str] = ()
    lacks_platform: bool = False
    exit_code: int
    comparison: Comparison | None = None

    @property
    def findings(self) -> Sequence[FindingText]:
        """The findings of the run: the causes that explain its failures, in words."""
        return self.summary.findings


class Session:
    """One run of the judge, from its options to its exit code.

    Attributes:
      options: the options of the run.
      settings: the settings of the project.
      kernel_options: the options that say how kernels are found and where they run.
      implementations: the implementations to judge.
      plan: all jobs of the run, including those of other shards.
      jobs: the jobs of this session's shard.
      notes: lines for the user about the run, such as which implementations `--require-platform` leaves out.
    """

    def __init__(
        self,
        options: RunSpec,
        *,
        implementations: Sequence[Implementation] = (),
        folder: Path | None = None,
        handshakes: Sequence[tuple[str, str]] = (),
        is_worker: bool = False,
        executor: concurrent.futures.Executor | None = None,
        format_repetition: Callable[[Record], str] | None = None,
        compiler_options: Mapping[str, bool | int] | None = None,
        writes_step_summary: bool = True,
    ) -> None:
        """Check files, find implementations and plan the jobs.

        Args:
          options: the options of the run.
          implementations: the implementations to judge, in place of those that the options name. They run in this
            process.
          folder: the folder whose project has the settings; the current one if left out.
          handshakes: pairs of a kernel's name and its handshake with the process that started this one.
          is_worker: whether this is a worker of pytest-xdist. Then another process checks and writes the files.
          executor: runs the jobs in its processes, in place of worker processes of this session. They find
            implementations by name, so it cannot be combined with `implementations`. `options.jobs` is the number of
            its workers (one a core).
          format_repetition: formats what reproduces a record, such as Python code, in place of a command.
          compiler_options: for first judgements in a process whose XLA flags were not set for judging.
          writes_step_summary: whether a step of GitHub Actions gets a summary of the run.

        Raises:
          CannotJudge: if the run is not possible; the message is one line.
        """
        self._started = time.perf_counter()
        self.options = options
        self._is_worker = is_worker
        self._format_repetition = format_repetition
        self._compiler_options = compiler_options
        self._writes_step_summary = writes_step_summary
        self._is_given = bool(implementations)
        self._is_selection_pending = bool(options.selection)  # `select_jobs` will be called
        self._journal: Journal | None = None
        self._runner: Runner | None = None
        self._run: Run | None
        self._finished: dict[int, tuple[Record, ...]] | None
        self._shrunk: list[str] = []
        self._is_followed_up = False
        if not is_worker:
            remove_abandoned_folders()
            self._check_files()
        self.settings = load_project_settings(folder)
        self.kernel_options = build_kernel_options(options, handshakes=handshakes)
        self._platform_note = ""
        self.implementations = list(implementations) or self._select_native(self._find_implementations())
        self.plan = self._build_plan()
        if not self.plan.jobs:
            raise CannotJudge(self._describe_empty_plan())
        self.jobs = run_plan.select_shard(self.plan.jobs, *options.shard) if options.shard else tuple(self.plan.jobs)
        self._remote: RemotePool | None = None
        if executor is not None or options.cluster is not None:
            self._remote = open_pool(options, self.implementations, executor, is_given=self._is_given)
        self._prepare_plan()

    def _prepare_plan(self) -> None:
        """Number the planned jobs, and load those that a resumed file has finished."""
        self._numbers = {id(job): number for number, job in enumerate(self.plan.jobs)}
        self._run, self._finished = None, None
        if self.options.resume is not None and not self._is_worker and not self._is_selection_pending:
            self._run, self._finished = self._load_resumed()
        self.notes = [self._platform_note] if self._platform_note else []
        if self._finished:
            self.notes.append(describe_resumed_jobs(len(self._finished)))
        if self._remote is not None:
            self.notes += self._remote.notes

    def select_jobs(self, select: Callable[[Job], Job | None], selection: str, *, further: Sequence[Job] = ()) -> None:
        """Leave out planned jobs, or some of their checks. Call this before `begin`.

        The plan stays as it is if nothing would be left.

        Args:
          select: returns the job to judge in place of a planned one, or None to leave it out.
          selection: how the caller selects, as the user wrote it, such as `-k forward`.
          further: jobs to add that the plan lacks.

        Raises:
          CannotJudge: if the file to resume is from another run.
        """
        self._is_selection_pending = False
        selected = {id(job): found for job in self.plan.jobs if (found := select(job)) is not None}
        if selected or further:
            self.jobs = (*(selected[id(job)] for job in self.jobs if id(job) in selected), *further)
            self.plan = dataclasses.replace(self.plan, jobs=(*selected.values(), *further))
            self.options = dataclasses.replace(self.options, selection=selection)
        self._prepare_plan()

    def _check_files(self) -> None:
        """Check that outputs can be written, and read the baseline, before the slow steps of a session."""
        options = self.options
        if options.resume is not None:
            check_writable(options.resume, "resume", prefix=options.option_prefix)
        outputs = check_outputs(
            report=options.report, json=options.json, markdown=options.markdown, prefix=options.option_prefix
        )
        step = find_step_summary() if self._writes_step_summary else None
        self._outputs = dataclasses.replace(outputs, step=step)
        self._baseline = None
        if options.baseline is None:
            return
        written = [path.resolve() for path in self._list_journal_paths()]
        name = options.spell("baseline")
        if parse_input_path(options.baseline).resolve() in written:
            raise CannotJudge(f"{name}={options.baseline} is written by this run too: give the records another file")
        try:
            self._baseline = read_compared_runs(options.baseline, command=options.command)
        except CannotJudge as error:
            raise CannotJudge(f"{name}: {error}") from error

    def _list_journal_paths(self) -> list[Path]:
        """Return the paths of the files of records to write. A resumed file comes first."""
        if self.options.resume is None:
            return self._outputs.journals
        first = Path(self.options.resume)
        return [first, *(path for path in self._outputs.journals if path.resolve() != first.resolve())]

    def _find_implementations(self) -> list[Implementation]:
        options = self.options
        if options.judge_all:
            names = implementation_registry.list_implementations()
        else:
            listed = self.settings.implementations if options.use_listed else ()
            names = self.settings.resolve_groups(options.implementations or listed)
        if not names:
            raise CannotJudge(
                f"nothing to judge: give {options.spell('implementations')}=NAME, or list implementations under "
                "[tool.attention_conformance] in pyproject.toml"
            )
        return find_implementations(names, self.kernel_options)

    def _select_native(self, found: list[Implementation]) -> list[Implementation]:
        """Leave out what does not run natively on the required platform. Raises `CannotJudge` if nothing does."""
        options = self.options
        if options.require_platform is None:
            return found
        selection = select_native(found, options.require_platform, judged_elsewhere=options.cluster is not None)
        self._platform_note = selection.describe()
        if not selection.kept:
            raise CannotJudge(f"nothing was judged: {self._platform_note}")
        return list(selection.kept)

    def _select_checks(self) -> tuple[Check, ...]:
        for name in self.options.checks:
            if name not in CHECKS_BY_NAME:
                if "," in name:
                    raise CannotJudge(f"{name!r} is several names: give {self.options.spell('checks')} once for each")
                known = f"known are {', '.join(CHECKS_BY_NAME)}"
                raise CannotJudge(f"unknown check {name!r}: {known}{suggest_name(name, CHECKS_BY_NAME)}")
        return tuple(check for check in CHECKS if not self.options.checks or check.name in self.options.checks)

    def _build_plan(self) -> Plan:
        options, implementations = self.options, self.implementations
        checks = self._select_checks()
        if options.problem:
            cases = select_problem_cases(
                options.problem, full_size=options.full_size, case=options.case, query=options.cases
            )
            return run_plan.plan_problem(implementations, cases, checks)
        if options.case is not None:
            case = parse_case(options.case)
            selection = Subchecks(pullbacks=(options.pullback,)) if options.pullback else ALL_SUBCHECKS
            plans = [run_plan.plan_case(implementation, case, checks, selection) for implementation in implementations]
            return Plan(tuple(job for one in plans for job in one.jobs), ())
        if options.regressions:
            return run_plan.plan_regressions(implementations, checks)
        return run_plan.plan_run(
            implementations,
            level=options.chosen_level,
            seeds=options.seeds or (0,),
            query=options.cases,
            checks=checks,
        )

    def _describe_empty_plan(self) -> str:
        options = self.options
        if options.cases is not None:
            query = f"{options.spell('cases')}={options.cases!r}"
            if options.problem:
                return f"no case of {options.problem} matches {query}"
            grids = [
                ImplementationGrids(one, get_grid_level(options.chosen_level), seed)
                for one in self.implementations
                for seed in options.seeds or (0,)
            ]
            ids = (case.id for one in grids for grid in one.all_grids for case in grid.cases)
            closest = suggest_query(options.cases, ids)
            return f"no case of the grid matches {query}{closest} (see `python -m conformance list cases`)"
        return f"no case asks for {', '.join(options.checks) or 'any check'}"

    @property
    def run(self) -> Run:
        """The run record: the facts that hold for all records of this run, such as versions and planned jobs."""
        if self._run is None:
            self._run = self._describe_run()
        return self._run

    def _describe_run(self) -> Run:
        options = self.options
        run = provenance.build_run(
            self.implementations,
            self.plan,
            command=options.command,
            level=options.recorded_level,
            seeds=options.recorded_seeds,
            narrowed=options.describe_narrowing(),
            query=options.build_query(),
            shard="/".join(map(str, options.shard or ())),
            limits=self.settings.tolerances.rows(),
            kernels=self.kernel_options,
        )
        remote = self._remote.environment if self._remote is not None else {}
        return msgspec.structs.replace(run, environment={**run.environment, **remote})

    def _load_resumed(self) -> tuple[Run, dict[int, tuple[Record, ...]]]:
        """Load the run that `--resume` continues, and the records of its finished jobs by number."""
        assert self.options.resume is not None
        place = Path(self.options.resume)
        try:
            return load_resumed_run(place, self._describe_run())
        except OSError as error:
            reason = f"{place} cannot be read: {error.strerror or error}"
            raise CannotJudge(f"{self.options.spell('resume')}: {reason}") from error
        except (ResumeMismatchError, ValueError) as error:
            raise CannotJudge(f"{self.options.spell('resume')}: {error}") from error

    @property
    def handshakes(self) -> list[tuple[str, str]]:
        """Pairs of a kernel's name and its handshake, which the kernel's processes in workers must repeat."""
        return list(collect_handshakes(self.implementations))

    @property
    def recorded(self) -> RecordedRun:
        """The run and its records so far, as reading its file returns them."""
        assert self._journal is not None
        return self._journal.recorded

    @property
    def has_begun(self) -> bool:
        """Whether `begin` has opened the files of records."""
        return self._journal is not None

    def begin(self, run: Run | None = None, *, seconds: float = 0.0) -> None:
        """Open the files of records. Raises `JournalWriteError` if one cannot be written.

        Args:
          run: the run record, if another process judges.
          seconds: how long that process has judged.
        """
        self._run = run or self._run
        self._started -= seconds
        self._journal = Journal(self._list_journal_paths(), self.run, self._finished)

    def find_number(self, job: Job) -> int | None:
        """Return the number of a job in the plan; None for a job whose checks the caller has narrowed since."""
        if (number := self._numbers.get(id(job))) is not None:
            return number
        return next((number for number, planned in enumerate(self.plan.jobs) if planned == job), None)

    def find_finished(self, number: int | None) -> list[Record] | None:
        """Return the records that the resumed file has for a job; None if it has none."""
        if self.options.resume is None or number is None:
            return None
        if self._finished is None:  # in a worker of pytest-xdist: its main process has checked the file
            self._finished = dict(read_runs(Path(self.options.resume))[0].done)
        return list(self._finished[number]) if number in self._finished else None

    def judge(self, job: Job) -> list[Record]:
        """Judge a job in this process, and return its records."""
        if self._runner is None:
            self._runner = self._create_runner()
        return self._runner.judge(job)

    def _create_runner(self, *, confirmed: float = ENOUGH_CONFIRMED) -> Runner:
        return Runner(
            self.settings,
            confirmed=confirmed,
            options=self.kernel_options.options,
            format_repetition=self._format_repetition,
            compiler_options=self._compiler_options,
        )

    def record(self, number: int | None, judged: Sequence[Record]) -> None:
        """Write the records of a job to the files. Raises `JournalWriteError`.

        Args:
          number: the number of the job in the plan; None if only some of its checks were run.
          judged: the records.
        """
        assert self._journal is not None
        if number is None:
            self._journal.add_records(judged)
        else:
            self._journal.add_job(number, judged)

    def describe_plan(self) -> str:
        """Describe in one line what will be judged, and about how long that takes on this machine."""
        options = self.options
        done = self._finished or {}
        waiting = [job for job in self.jobs if self._numbers[id(job)] not in done]
        workers = self._count_workers(len(waiting))
        parts = [f"judging {', '.join(one.name for one in self.implementations)} on {jax.default_backend()}"]
        level = options.recorded_level
        parts.append(level if options.is_one_case_or_problem or options.regressions else f"level {level}")
        jobs = "1 job" if len(waiting) == 1 else f"{len(waiting):,} jobs"
        parts.append(f"{jobs} in 1 process" if workers == 1 else f"{jobs} in {workers} processes")
        seconds = _START_SECONDS + sum(len(job.checks) for job in waiting) * _CHECK_SECONDS / workers
        slowness = _measure_slowness(workers if self._remote is None else 0)
        return f"{', '.join(parts)}: about {text_format.format_rough_duration(seconds * slowness)}"

    def _count_workers(self, jobs: int) -> int:
        return 1 if self._is_given else self.options.jobs or _choose_worker_count(jobs)

    def judge_jobs(self, show_progress: ShowProgress = show_no_progress) -> tuple[str, str]:
        """Judge and record all jobs, except those that the resumed file has.

        Returns:
          How the run ended (`complete`, `interrupted` or `failed`), and why unless it is complete.
        """
        done = self.recorded.done
        waiting = [job for job in self.jobs if self._numbers[id(job)] not in done]
        finished = [done[number] for job in self.jobs if (number := self._numbers[id(job)]) in done]
        fail_fast = self.options.fail_fast
        if fail_fast:
            waiting.sort(key=lambda job: not job.short)  # short jobs first, so that a failure shows sooner
        try:
            with interrupts.raise_on_signal(), show_progress(len(self.jobs), finished) as progress:
                interrupts.raise_if_stopped()

                def on_job(job: Job, judged: list[Record]) -> None:
                    self.record(self._numbers[id(job)], judged)
                    progress.advance(judged)
                    if fail_fast and any(record.verdict in RED for record in judged):
                        raise RunStopped(FIRST_FAILURE)

                if waiting:
                    self._judge_waiting(waiting, on_job)
        except RunStopped as error:
            return INTERRUPTED, str(error)
        except implementation_registry.ImplementationNotFound as error:  # a worker may fail to load a kernel
            return FAILED, str(error)
        except (ExecutorFailed, WorkerMismatch) as error:
            return FAILED, str(error)
        except KeyboardInterrupt:
            return INTERRUPTED, interrupts.describe_signal()
        if missing := sum(self._numbers[id(job)] not in self.recorded.done for job in self.jobs):
            return FAILED, f"{missing:,} of its jobs have no records"
        return COMPLETE, ""

    def _judge_waiting(self, jobs: Sequence[Job], on_job: Callable[[Job, list[Record]], None]) -> None:
        runner = self._create_runner()
        if self._remote is not None:
            pool = self._remote.pool
        else:
            workers = self._count_workers(len(jobs))
            if workers == 1:
                runner.run(jobs, on_job)
                return
            pool = LocalPool(workers)
        judge_in_parallel(
            jobs, pool, self.kernel_options, on_job, runner.report_lost, one_by_one=self.options.fail_fast
        )

    def follow_up(self, say: Say = say_nothing) -> None:
        """Confirm findings, compare failing kernels with planted bugs, and with `--shrink` shrink findings.

        A stop signal ends only this step: results are still written. Raises `JournalWriteError`.
        """
        assert self._journal is not None
        if interrupts.get_received_signal() or not any(record.verdict in RED for record in self.recorded.records):
            return
        options, implementations = self.options, self._list_implementations_here()
        if not options.is_one_case_or_problem:
            option = spell_diagnose_option(options.command)
            seconds = follow_up.FollowUpSeconds(options.confirm_seconds, options.diagnose_seconds, option)
            spent = time.perf_counter() - self._started
            runner = self._create_runner(confirmed=0)
            follow_up.follow_up(self._journal, implementations, runner, seconds, spent=spent, say=say)
            self._is_followed_up = options.diagnose_seconds != 0
        if options.shrink and interrupts.get_received_signal() is None:
            from conformance.follow_up import shrinker  # imported late: it loads Hypothesis

            with interrupts.end_on_signal():
                runner = self._create_runner()
                for line in shrinker.shrink_findings(self._journal, implementations, runner, say):
                    self._shrunk.append(line)  # one by one, so that a signal loses no finished line

    def _list_implementations_here(self) -> list[Implementation]:
        """Return the implementations that this process can judge further, on the platform where they were judged."""
        elsewhere = self._remote.pool.platforms if self._remote is not None else frozenset()
        return [each for each in self.implementations if each.accelerator.platform not in elsewhere]

    def finish(self, how: str, reason: str) -> SessionResult:
        """Add the records that concern the run as a whole, close the files, and build the result.

        If a file cannot be written, the run has failed, but its records are still reported.

        Args:
          how: how the run ended, `complete`, `interrupted` or `failed`.
          reason: why the run was interrupted or failed; otherwise empty.
        """
        assert self._journal is not None
        stale: list[Record] = []
        excess: list[Record] = []
        try:
            judged = {record.implementation for record in self.recorded.records}
            on_chip = {(record.implementation, record.platform) for record in self.recorded.records}
            present = [
                each
                for each in self.implementations
                if each.name in judged and (each.name, each.accelerator.platform) not in on_chip
            ]
            self._journal.add_records(self._set_repetition(build_hardware_records(present)))
            excess = self._set_repetition(flag_share.find_excess(self.recorded.records))
            self._journal.add_records(excess)
            changed = build_changed_file_records(self._journal.run, self.recorded.records)
            self._journal.add_records(self._set_repetition(changed))
            is_whole = self.options.is_whole and len(self.recorded.done) == len(self.plan.jobs)
            if how == COMPLETE and is_whole:
                stale = self.settings.find_stale_entries(self.recorded.records, jax.__version__)
                self._journal.add_records(stale)
            self._journal.end(how, reason=reason, seconds=time.perf_counter() - self._started)
        except JournalWriteError as error:
            how, reason = FAILED, self._abandon(error)
        records, info = merge_runs([self.recorded], command=self.run.command, is_followed_up=self._is_followed_up)
        lacks_platform = self._lacks_platform(records)
        code = compute_exit_code(records, self.implementations, how, lacks_platform=lacks_platform)
        return SessionResult(
            how=how,
            reason=reason,
            recorded=self.recorded,
            records=records,
            info=info,
            summary=build_summary(records, info),
            stale=stale,
            flag_excess=excess,
            shrunk=self._shrunk,
            lacks_platform=lacks_platform,
            exit_code=interrupts.resolve_exit_code(code),
        )

    def _set_repetition(self, found: Sequence[Record]) -> list[Record]:
        """Return records of the run as a whole with what reproduces them, if the caller formats that."""
        if (format_repetition := self._format_repetition) is None:
            return list(found)
        return [msgspec.structs.replace(record, reproduce=format_repetition(record)) for record in found]

    def _abandon(self, error: JournalWriteError) -> str:
        """End the run without writing its files further, and return the reason for the user."""
        assert self._journal is not None
        reason = f"{error}; what was judged before is in it"
        self._journal.abandon(reason)
        return reason

    def write_outputs(self, result: SessionResult) -> None:
        """Write page and summary. Raises `CannotJudge` if one cannot be written."""
        self._outputs.write(result.summary)

    def compare_with_baseline(self, result: SessionResult) -> SessionResult:
        """Add the comparison with the baseline, if there is one, to the result. A regression makes the exit code 1.

        Raises:
          CannotJudge: if this run has no record to compare.
        """
        if self._baseline is None:
            return result
        now = gather_compared_runs([result.recorded], "this run", command=self.options.command)
        changed = compare_runs(self._baseline, now)
        code = result.exit_code or (1 if changed.regressions else 0)
        return dataclasses.replace(result, comparison=changed, exit_code=code)

    def run_to_end(self, show_progress: ShowProgress = show_no_progress, say: Say = say_nothing) -> SessionResult:
        """Judge all jobs, follow up on findings, and write all files.

        A signal stops judging. The records until then are reported.

        Raises:
          CannotJudge: if a file cannot be written.
        """
        interrupts.stop_raising()
        try:
            self.begin()
        except JournalWriteError as error:
            self.close()
            raise CannotJudge(str(error)) from error
        try:
            how, reason = self.judge_jobs(show_progress)
            self.close()
            if how == COMPLETE:
                self.follow_up(say)
        except JournalWriteError as error:
            how, reason = FAILED, self._abandon(error)
        except Exception as error:  # a bug of this program: keep the records so far, and write the reason into the file
            assert self._journal is not None
            with contextlib.suppress(JournalWriteError):
                seconds = time.perf_counter() - self._started
                self._journal.end(FAILED, reason=f"{type(error).__name__}: {error}", seconds=seconds)
            raise
        finally:
            self.close()
        result = self.finish(how, reason)
        self.write_outputs(result)
        return result

    def close(self) -> None:
        """End the connection to a cluster, if there is one. `run_to_end` does this itself."""
        if self._remote is not None:
            self._remote.close()

    def _lacks_platform(self, records: Sequence[Record]) -> bool:
        required = self.options.require_platform
        return bool(required) and not any(r.platform == required and r.verdict in JUDGED for r in records)


def merge_runs(
    recorded: Sequence[RecordedRun], *, command: str, is_followed_up: bool = False
) -> tuple[list[Record], RunInfo]:
    """Merge the records of runs, and collect what a report shows besides them, such as the likeliest planted bugs.

    Args:
      recorded: the runs.
      command: the command that the report shows.
      is_followed_up: whether failing kernels were compared with planted bugs after judging.
    """
    records, info = aggregate_runs(recorded, command=command, detection=detection_table.load_table())
    return records, bug_diagnosis.add_diagnoses(info, records, is_followed_up=is_followed_up)


def compute_exit_code(
    records: Sequence[Record], implementations: Sequence[Implementation], how: str, *, lacks_platform: bool
) -> int:
    """Return 0 if all implementations conform, 1 if one does not, 2 if one could not be judged.

    An implementation whose accelerator this machine lacks counts only if some check judged it all the same, or if no
    other implementation counts.
    """
    if how == FAILED:
        return 2
    judged = {record.implementation for record in records if record.verdict in JUDGED}
    present = [each for each in implementations if each.accelerator.absent is None or each.name in judged]
    standings = {
        conformity.compute_conformity([record for record in records if record.implementation == each.name])
        for each in present or implementations
    }
    is_judged = not lacks_platform and how == COMPLETE and conformity.NOT_JUDGED not in standings
    return choose_exit_code(is_wrong=conformity.DOES_NOT_CONFORM in standings, is_judged=is_judged)


def _choose_worker_count(jobs: int) -> int:
    """Choose the number of processes that judge so many jobs on this machine."""
    most = _MAX_WORKERS.get(jax.default_backend(), 1)
    return min(os.cpu_count() or 1, most) if jobs > _FEW_JOBS else 1


def _measure_slowness(workers: int) -> float:
    """Estimate how much longer a run takes here than on the machine where checks were timed.

    The best of three loops tells how fast a processor is. The load tells how many processes share the processors.

    Args:
      workers: how many processes judge on this machine; 0 if other machines judge, whose load is unknown.
    """
    took = []
    for _ in range(3):
        started = time.process_time()
        for _ in range(_LOOP_STEPS):
            pass
        took.append(time.process_time() - started)
    try:
        load = os.getloadavg()[0]
    except OSError:
        load = 0.0
    sharing = max(1.0, (load + workers) / (os.cpu_count() or 1)) if workers else 1.0
    return max(0.2, min(took) / _LOOP_SECONDS) * sharing


def run_session(
    options: RunSpec,
    *,
    implementations: Sequence[Implementation] = (),
    show_progress: ShowProgress = show_no_progress,
    say: Say = say_nothing,
    executor: concurrent.futures.Executor | None = None,
    format_repetition: Callable[[Record], str] | None = None,
    compiler_options: Mapping[str, bool | int] | None = None,
    writes_step_summary: bool = True,
) -> SessionResult:
    """Run a whole session in this process, and end the kernels' processes.

    Args:
      options: the options of the run.
      implementations: the implementations to judge, in place of those that the options name. They run in this process.
      show_progress: opens a display of the run's progress.
      say: called with lines for the user while the session goes on.
      executor: runs the jobs in its processes, which find implementations by name.
      format_repetition: formats what reproduces a record, such as Python code, in place of a command.
      compiler_options: for first judgements in a process whose XLA flags were not set for judging.
      writes_step_summary: whether a step of GitHub Actions gets a summary of the run.

    Raises:
      CannotJudge: if the run is not possible; the message is one line.
    """
    prepare_process()
    with interrupts.record_signals():
        try:
            with interrupts.raise_on_signal():
                session = Session(
                    options,
                    implementations=implementations,
                    executor=executor,
                    format_repetition=format_repetition,
                    compiler_options=compiler_options,
                    writes_step_summary=writes_step_summary,
                )
            return session.compare_with_baseline(session.run_to_end(show_progress, say))
        finally:
            kernel_process.end_all_processes()
