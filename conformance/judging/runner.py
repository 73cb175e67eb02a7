"""Judge jobs one after another in this process, and build their records.

A job is one implementation on one case under some checks. `Runner` makes sure that the case can fail, runs the checks,
has failures judged again, and marks expected failures.
"""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import msgspec
import numpy as np

from conformance import interrupts
from conformance.check_api.judgement import Judgement, build_unsupported, catch_errors, format_distinct
from conformance.check_api.scopes import GRID
from conformance.check_api.subchecks import ALL_SUBCHECKS, list_pullbacks
from conformance.check_api.subject import Subject
from conformance.checks import CHECKS, CHECKS_BY_NAME, Check
from conformance.execution import implementation_registry
from conformance.execution.executor import Executor
from conformance.judging import discrimination
from conformance.judging.job import Job
from conformance.judging.rejudgement import ENOUGH_CONFIRMED, Rejudger
from conformance.judging.settings import Settings
from conformance.sandbox import loaded_files
from conformance.sandbox.kernel_process import ProcessLost
from conformance.sandbox.sandboxed_executor import SupportQueryFailed, create_executor
from conformance.truth.error_patterns.map_drawing import draw_error_map
from conformance.truth.error_patterns.pattern import find_pattern
from impls.contract.implementation import Implementation
from reports import records
from reports.records import Record, Run

ABANDONED_CASE = "no further check of this case was run"
"""The last words of the reason in the record of a check during which the kernel's process died."""
# A compiled program takes 0.3 to 2.5 MB, so JAX's caches are cleared after this many jobs.
_CLEAR_EVERY = 60
# Checks that can judge an accelerator's kernel on a machine without the accelerator, by compiling or interpreting it.
_NEED_NO_ACCELERATOR = frozenset(check.name for check in CHECKS if check.scope.without_accelerator is not None)
_GRID_CHECKS = tuple(check for check in CHECKS if check.scope is GRID)
# Checks that differentiate one of the two calls (with or without residuals), the one that `Subchecks` names.
_ONE_PULLBACK_CHECKS = frozenset({"gradients_part", "primal", "poison", "independence", "linearity"})
# Import the functions of the checks now: before code of a kernel runs, and in the server that forks processes.
_CHECK_FUNCTIONS = [check.run for check in CHECKS]


class Runner:
    """Judge jobs one after the other, and keep compiled functions from one job to the next."""

    def __init__(
        self,
        settings: Settings,
        *,
        confirmed: float = ENOUGH_CONFIRMED,
        options: Sequence[str] = (),
        format_repetition: Callable[[Record], str] | None = None,
        compiler_options: Mapping[str, bool | int] | None = None,
    ) -> None:
        """Create a runner.

        Args:
          settings: tolerances and expected failures.
          confirmed: the number of confirmed failures of a result in a check, after which its failures are not judged
            again; 0 to judge no failure again.
          options: command-line options for the commands that reproduce a record: how kernels are found and run.
          format_repetition: formats what reproduces a record, such as Python code, in place of a command.
          compiler_options: for first judgements in a process whose XLA flags were not set for judging.
        """
        self._settings = settings
        self._options = tuple(options)
        self._format_repetition = format_repetition
        self._compiler_options = compiler_options
        self._confirmed = confirmed
        self._executors: dict[tuple[str, int], tuple[Implementation, Executor]] = {}
        self._rejudges: dict[str, Rejudger] = {}
        self._done = 0

    def run(self, jobs: Sequence[Job], on_job: Callable[[Job, list[Record]], None] | None = None) -> list[Record]:
        """Judge `jobs` in order, call `on_job` with each finished job and its records, and return all records."""
        records_found: list[Record] = []
        for job in jobs:
            job_records = self.judge(job)
            records_found += job_records
            if on_job is not None:
                on_job(job, job_records)
        return records_found

    def judge(self, job: Job) -> list[Record]:
        """Judge one job and return its records.

        NumPy does not warn meanwhile: wrong results may be huge, infinite or NaN, and the verdict says so.
        """
        with np.errstate(all="ignore"):
            return list(self.stream(job))

    def stream(self, job: Job) -> Iterator[Record]:
        """Judge one job and yield its records as they come."""
        executor = self._get_executor(job.implementation)
        needs_gradients = any(check.name == "gradients" for check in job.checks)
        subject = Subject(
            executor, job.case, self._settings.tolerances, job.selection, needs_gradients, job.branch_search
        )
        rejudge = self._rejudges.setdefault(job.implementation.name, Rejudger(executor, self._confirmed))
        self._done += 1
        if self._done % _CLEAR_EVERY == 0:
            jax.clear_caches()
        if (absent := job.implementation.accelerator.absent) is not None:
            stream = _judge_without_accelerator(subject, job.checks, absent, rejudge)
        elif isinstance(reason := _find_unsupported_reason(job), Judgement):
            stream = iter([_build_record(subject, "support", reason, None, 0.0)])
        elif reason is not None:
            stream = _judge_unsupported(subject, job.checks, reason, rejudge)
        elif (count := executor.devices) < job.implementation.devices:
            stream = iter(
                [
                    _build_record(
                        subject, "devices", _build_device_judgement(job.implementation.devices, count), None, 0.0
                    )
                ]
            )
        else:
            stream = _judge_checks(subject, job.checks, rejudge)
        for record in stream:
            if later_files := executor.pop_later_files():
                record = msgspec.structs.replace(record, files=later_files)
            yield self._finish_record(record)
        for further in subject.further_cases:
            for record in self.stream(Job(job.implementation, further.case, _GRID_CHECKS)):
                if record.verdict in records.RED:
                    reason = "; ".join(filter(None, (record.reason, further.reason)))
                    record = msgspec.structs.replace(record, reason=reason)
                yield record

    def _get_executor(self, implementation: Implementation) -> Executor:
        """Return the executor of an implementation. Copies with other declarations share its compiled functions."""
        key = implementation.name, id(implementation.call)
        if key not in self._executors:
            self._executors[key] = implementation, create_executor(implementation, self._compiler_options)
        first, executor = self._executors[key]
        return executor if implementation is first else executor.with_declarations(implementation)

    def _finish_record(self, record: Record) -> Record:
        record = self._settings.fail_unreached_branch(record)
        settled = self._settings.mark_expected_failures(record, jax.__version__)
        if "--in-process" in self._options and not implementation_registry.is_builtin(record.implementation):
            settled = msgspec.structs.replace(settled, figures={**settled.figures, records.IN_PROCESS: 1.0})
        if self._format_repetition is not None:
            return msgspec.structs.replace(settled, reproduce=self._format_repetition(settled))
        return msgspec.structs.replace(settled, reproduce=" ".join((settled.reproduce, *self._options)))

    def report_lost(self, job: Job) -> list[Record]:
        """Return the records of a job whose process died: an error for each of its checks."""
        subject = Subject(create_executor(job.implementation), job.case, self._settings.tolerances, job.selection)
        reason = "the process that judged this case died: the kernel crashed it, or it ran out of memory"
        judgement = Judgement(observable="all", verdict=records.ERROR, reason=reason)
        lost_records = [_build_record(subject, check.name, judgement, None, 0.0) for check in job.checks]
        return [self._finish_record(record) for record in lost_records]


def _find_unsupported_reason(job: Job) -> str | Judgement | None:
    """Return why the job's case is not supported, None if it is, or an error if the kernel's process cannot answer."""
    try:
        return job.implementation.supports(job.case)
    except SupportQueryFailed as error:
        return Judgement(observable="case", verdict=records.ERROR, reason=str(error))


def build_hardware_records(implementations: Iterable[Implementation]) -> list[Record]:
    """Build an `unjudged` record for each accelerator kernel that this machine can only interpret."""
    kernels = ((implementation.name, implementation.accelerator) for implementation in implementations)
    return [
        Record(
            implementation=name,
            platform=accelerator.platform,
            case="*",
            check="hardware",
            observable="all",
            verdict=records.UNJUDGED,
            reason=f"no {accelerator.platform.upper()} in this machine: the kernel was judged in an interpreter only",
            reproduce=f"python -m conformance run --impl={shlex.quote(name)} --require-platform={accelerator.platform}",
        )
        for name, accelerator in kernels
        if accelerator.platform is not None and accelerator.interpreted and accelerator.absent is None
    ]


def build_changed_file_records(run: Run, judged_records: Iterable[Record]) -> list[Record]:
    """Build an error for each kernel whose files changed during the run: it is unknown which content was judged."""
    by_kernel = {name: list(kernel.files.items()) for name, kernel in run.kernels.items()}
    platforms: dict[str, str] = {}
    for record in judged_records:
        by_kernel.setdefault(record.implementation, []).extend(record.files.items())
        platforms.setdefault(record.implementation, record.platform)
    return [
        Record(
            implementation=name,
            platform=platforms[name],
            case="*",
            check="files",
            observable="all",
            verdict=records.ERROR,
            reason=f"files of the kernel changed while it was judged: {'; '.join(changed)}",
            reproduce=f"python -m conformance run --impl={shlex.quote(name)}",
        )
        for name, files in by_kernel.items()
        if name in platforms and (changed := loaded_files.find_changed(files))
    ]


def find_platform(implementation: Implementation, check: str | None = None) -> str:
    """Return the platform to name in records: the JAX backend, with `-interpret` if the kernel is interpreted.

    A kernel whose accelerator this machine lacks is recorded under the accelerator's platform, except by checks that
    need no accelerator.
    """
    accelerator = implementation.accelerator
    interpreted = accelerator.interpreted
    if accelerator.absent is not None:
        if check not in _NEED_NO_ACCELERATOR and accelerator.platform is not None:
            return accelerator.platform
        interpreted = True
    backend = create_executor(implementation).backend
    return f"{backend}-interpret" if interpreted else backend


def format_reproduction(subject: Subject, check: str) -> str:
    """Return the command that repeats one judgement. It names the check, unless the record belongs to none."""
    command = f"python -m conformance run --impl={shlex.quote(subject.implementation.name)} --case={subject.case.id}"
    if check in CHECKS_BY_NAME:
        command += f" --check={check}"
    is_residual_pullback = "plain" not in subject.selection.pullbacks and "plain" in list_pullbacks(
        subject.implementation, subject.case
    )
    return (
        f"{command} --pullback={subject.selection.pullbacks[0]}"
        if is_residual_pullback and check in _ONE_PULLBACK_CHECKS
        else command
    )


def _judge_checks(subject: Subject, checks: Iterable[Check], rejudge: Rejudger) -> Iterator[Record]:
    """Run checks on a supported case and yield their records.

    If the case cannot be judged by, because simple wrong results would pass or too many rows are undecided, yield one
    `unjudged` record.
    """
    margin = None
    checks = tuple(checks)
    compares = any(check.compares for check in checks)
    left_out = _count_left_out(subject) if compares else {}
    if left_out and left_out["undecided_rows"] > discrimination.MAX_UNDECIDED_SHARE * left_out["rows"]:
        yield _build_record(subject, "discrimination", _build_undecided_judgement(left_out), margin, 0.0)
        return
    for check in checks:
        check.start(subject)
    subject, margins = _ensure_discrimination(subject) if compares else (subject, {})
    if margins:
        null, margin = discrimination.find_weakest_null(margins)
        if not margin >= discrimination.REQUIRED_MARGIN:
            reason = (
                f"the case does not discriminate: the wrong result {null!r} would fall only "
                "{} times over the limit, {} are required".format(
                    *format_distinct(margin, discrimination.REQUIRED_MARGIN)
                )
            )
            weak = Judgement(observable="case", verdict=records.UNJUDGED, reason=reason)
            yield _build_record(subject, "discrimination", weak, margin, 0.0)
            yield from _report_unrequested_death(subject, checks)
            return
    for check in checks:
        try:
            for judgement, seconds in _time_check(check, subject, rejudge):
                if left_out and check.compares:
                    judgement = dataclasses.replace(judgement, figures={**judgement.figures, **left_out})
                yield _build_record(subject, check.name, judgement, margin, seconds)
        except ProcessLost as lost:  # no further check is run: each one might kill another process
            yield _build_record(subject, check.name, _build_lost_judgement(lost), margin, 0.0)
            return
    yield from _report_unrequested_death(subject, checks)


def _report_unrequested_death(subject: Subject, checks: Sequence[Check]) -> Iterator[Record]:
    """Yield an error if the kernel's process died in a call that was started ahead and whose result no check used."""
    try:
        subject.executor.settle()
    except ProcessLost as lost:
        yield _build_record(subject, checks[0].name, _build_lost_judgement(lost), None, 0.0)


def _ensure_discrimination(subject: Subject) -> tuple[Subject, Mapping[str, float]]:
    """Return a subject that discriminates, if possible, and its margins.

    If the case does not discriminate with the subchecks of its selection, all subchecks replace them.
    """
    margins = discrimination.compute_margins(subject)
    discriminates = not margins or discrimination.find_weakest_null(margins)[1] >= discrimination.REQUIRED_MARGIN
    if discriminates or subject.selection == ALL_SUBCHECKS:
        return subject, margins
    subject = dataclasses.replace(subject, selection=ALL_SUBCHECKS)
    return subject, discrimination.compute_margins(subject)


def _count_left_out(subject: Subject) -> dict[str, float]:
    """Count the undecided rows, which have more than one right answer, for a record's figures; empty if none."""
    count, rows = discrimination.count_undecided_rows(subject.problem)
    return {"undecided_rows": count, "rows": rows} if count else {}


def _build_undecided_judgement(left_out: Mapping[str, float]) -> Judgement:
    """Build the `unjudged` judgement of a case with too many undecided rows, which have more than one right answer."""
    reason = (
        f"rounding could change which keys are chosen in {left_out['undecided_rows']:,} of {left_out['rows']:,} rows, "
        f"which leaves too few to judge by: at most {discrimination.MAX_UNDECIDED_SHARE:.0%} may be left out"
    )
    return Judgement(observable="case", verdict=records.UNJUDGED, reason=reason, figures=left_out)


def _time_check(check: Check, subject: Subject, rejudge: Rejudger) -> Iterator[tuple[Judgement, float]]:
    """Yield the judgements of a check, each with its share of the seconds that the check took.

    If failures are not judged again, each judgement is yielded as soon as it is made, with its own time.
    """
    start = time.perf_counter()
    if rejudge.is_disabled:
        for judgement in _run_guarded(check, subject):
            interrupts.raise_if_stopped()
            yield judgement, time.perf_counter() - start
            start = time.perf_counter()
        return
    judgements = _run_check(check, subject, rejudge)
    seconds = (time.perf_counter() - start) / max(1, len(judgements))
    for judgement in judgements:
        yield judgement, seconds


def _run_check(check: Check, subject: Subject, rejudge: Rejudger) -> list[Judgement]:
    """Run a check, judge its failures again, and return the judgements that count."""
    judgements = list(_run_guarded(check, subject))
    interrupts.raise_if_stopped()
    judgements = rejudge.judge(check, subject, judgements)
    interrupts.raise_if_stopped()
    return judgements


def _run_guarded(check: Check, subject: Subject) -> Iterator[Judgement]:
    """Run a check; an exception of the implementation becomes a judgement."""
    return catch_errors("all", lambda: check.run(subject))


def _judge_without_accelerator(
    subject: Subject, checks: Iterable[Check], reason: str, rejudge: Rejudger
) -> Iterator[Record]:
    """Run the checks that need no accelerator, and yield one `unjudged` record for all others."""
    implementation = subject.implementation
    stand_ins = {check: check.scope.without_accelerator for check in checks}
    possible = [check for check, stand_in in stand_ins.items() if stand_in and stand_in(implementation) is not None]
    if possible and implementation.supports(subject.case) is None:
        yield from _judge_checks(subject, possible, rejudge)
        if len(possible) == len(stand_ins):
            return
    unjudged = Judgement(observable="case", verdict=records.UNJUDGED, reason=reason)
    yield _build_record(subject, "hardware", unjudged, None, 0.0)


def _judge_unsupported(subject: Subject, checks: Iterable[Check], reason: str, rejudge: Rejudger) -> Iterator[Record]:
    """Yield a record of why a case is not supported, then those of the checks for unsupported cases."""
    yield _build_record(subject, "support", build_unsupported("case", reason), None, 0.0)
    for check in checks:
        if not check.scope.supported:
            start = time.perf_counter()
            try:
                judgements = _run_check(check, subject, rejudge)
            except ProcessLost as lost:
                judgements = [_build_lost_judgement(lost)]
            for judgement in judgements:
                yield _build_record(subject, check.name, judgement, None, time.perf_counter() - start)


def _build_lost_judgement(lost: ProcessLost) -> Judgement:
    """Build the judgement for a kernel's process that died during a check."""
    return Judgement(observable="all", verdict=records.ERROR, reason=f"{lost}; {ABANDONED_CASE}")


def _build_device_judgement(needed: int, count: int) -> Judgement:
    """Build the judgement for a kernel that needs more devices than there are."""
    reason = (
        f"{needed} devices are needed, there are {count}; on CPU, XLA_FLAGS must have "
        f"--xla_force_host_platform_device_count={needed} (4 are set unless XLA_FLAGS is set already)"
    )
    return Judgement(observable="case", verdict=records.UNJUDGED, reason=reason)


def _build_record(subject: Subject, check: str, judgement: Judgement, margin: float | None, seconds: float) -> Record:
    """Build the record of one judgement."""
    implementation = subject.implementation
    return Record(
        implementation=implementation.name,
        platform=find_platform(implementation, check),
        case=subject.case.id,
        check=check,
        dtype=subject.case.dtype,
        features=subject.case.features,
        margin=margin,
        reproduce=format_reproduction(subject, check),
        seconds=round(seconds, 4),
        **{name: value for name, value in vars(judgement).items() if name != "failure"},
        **_locate_failure(judgement),
    )


def _locate_failure(judgement: Judgement) -> dict[str, Any]:
    """Find where in its tensor a wrong result differs, as fields of a record.

    The search waits until a record is built, since failures that do not stand after a second judgement need none.
    """
    failure = judgement.failure
    if failure is None:
        return {}
    located = find_pattern(failure)
    return {"pattern": located.words, "error_map": draw_error_map(failure, located.blocks) if failure.is_core else None}
