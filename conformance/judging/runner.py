"""Running jobs into records."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from conformance import interrupts, records
from conformance.check_api.judgement import Judgement, build_unsupported, catch_errors, format_distinct
from conformance.check_api.rotation import FULL_ROTATION, list_pullbacks
from conformance.check_api.subject import Subject
from conformance.checks import CHECKS, CHECKS_BY_NAME, Check
from conformance.contract import Implementation
from conformance.execution import implementation_registry
from conformance.execution.executor import Executor
from conformance.judging import discrimination
from conformance.judging.job import Job
from conformance.judging.rejudgement import ENOUGH_CONFIRMED, Rejudger
from conformance.judging.settings import Settings
from conformance.records import Record
from conformance.runs import Run
from conformance.sandbox import loaded_files
from conformance.sandbox.kernel_process import ProcessLost
from conformance.sandbox.sandboxed_executor import SupportQueryFailed, create_executor
from conformance.truth.error_patterns.map_drawing import draw_error_map
from conformance.truth.error_patterns.pattern import find_pattern

# Compiled programs take 0.3 to 2.5 MB each; beyond this many configurations the process is told to let go of them.
_CLEAR_EVERY = 60
# What compiles or interprets an accelerator's kernel, on any machine.
_NEED_NO_ACCELERATOR = frozenset(check.name for check in CHECKS if check.scope.without_accelerator is not None)
# What differentiates whichever of the two calls it is the case's turn to have differentiated.
_ROTATED_PULLBACK_CHECKS = frozenset({"gradients_part", "primal", "poison", "independence", "linearity"})


class Runner:
    """Judges jobs one after the other, keeping compiled functions from one job to the next."""

    def __init__(self, settings: Settings, *, confirmed: float = ENOUGH_CONFIRMED, options: Sequence[str] = ()) -> None:
        """A runner that judges failures again until `confirmed` of a check and result are confirmed; never with 0.

        `options` are those of the command that repeat how kernels are found and run.
        """
        self._settings = settings
        self._options = tuple(options)
        self._confirmed = confirmed
        self._executors: dict[str, Executor] = {}
        self._rejudges: dict[str, Rejudger] = {}
        self._done = 0

    def run(self, jobs: Sequence[Job], on_job: Callable[[Job, list[Record]], None] | None = None) -> list[Record]:
        """Judge `jobs` in order; `on_job` hears of each as it ends."""
        found: list[Record] = []
        for job in jobs:
            judged = self.judge(job)
            found += judged
            if on_job is not None:
                on_job(job, judged)
        return found

    def judge(self, job: Job) -> list[Record]:
        """The records of one job."""
        return list(self.stream(job))

    def stream(self, job: Job) -> Iterator[Record]:
        """The records of one job, as they come."""
        executor = self._executors.setdefault(job.implementation.name, create_executor(job.implementation))
        subject = Subject(executor, job.case, self._settings.tolerances, job.rotation)
        rejudge = self._rejudges.setdefault(job.implementation.name, Rejudger(executor, self._confirmed))
        self._done += 1
        if self._done % _CLEAR_EVERY == 0:
            jax.clear_caches()  # type: ignore[no-untyped-call] # untyped upstream
        if (absent := job.implementation.accelerator.absent) is not None:
            found = _judge_without_accelerator(subject, job.checks, absent, rejudge)
        elif isinstance(reason := _find_unsupported_reason(job), Judgement):
            found = iter([_build_record(subject, "support", reason, None, 0.0)])
        elif reason is not None:
            found = _judge_unsupported(subject, job.checks, reason, rejudge)
        elif (count := executor.devices) < job.implementation.devices:
            found = iter(
                [
                    _build_record(
                        subject, "devices", _build_device_judgement(job.implementation.devices, count), None, 0.0
                    )
                ]
            )
        else:
            found = _judge_checks(subject, job.checks, rejudge)
        for record in found:
            if later := executor.pop_later_files():
                record = dataclasses.replace(record, files=later)
            yield self._told(record)

    def _told(self, record: Record) -> Record:
        settled = self._settings.settle(record, jax.__version__)
        if "--in-process" in self._options and not implementation_registry.is_builtin(record.implementation):
            settled = dataclasses.replace(settled, figures={**settled.figures, records.IN_PROCESS: 1.0})
        return dataclasses.replace(settled, reproduce=" ".join((settled.reproduce, *self._options)))

    def report_lost(self, job: Job) -> list[Record]:
        """The records of a job whose process died: an error for each of its checks."""
        subject = Subject(create_executor(job.implementation), job.case, self._settings.tolerances, job.rotation)
        reason = "the process that judged this case died: the kernel crashed it, or it ran out of memory"
        died = Judgement(observable="all", verdict=records.ERROR, reason=reason)
        found = [_build_record(subject, check.name, died, None, 0.0) for check in job.checks]
        return [self._told(record) for record in found]


def _find_unsupported_reason(job: Job) -> str | Judgement | None:
    """Why the case is not supported, none if it is; an error where the kernel cannot even say that."""
    try:
        return job.implementation.supports(job.case)
    except SupportQueryFailed as error:
        return Judgement(observable="case", verdict=records.ERROR, reason=str(error))


def build_hardware_records(implementations: Iterable[Implementation]) -> list[Record]:
    """One `unjudged` record for each accelerator kernel that this machine can only interpret."""
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


def build_changed_file_records(run: Run, judged: Iterable[Record]) -> list[Record]:
    """Return an error for each kernel with files that changed while it was judged: nobody knows which content was."""
    by_kernel = {name: list(kernel.files.items()) for name, kernel in run.kernels.items()}
    platforms: dict[str, str] = {}
    for record in judged:
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
    """The platform that judgements are made on: the JAX backend, marked where the kernel is interpreted.

    Of a kernel that cannot run here, the platform that it is for, but for the checks that need no accelerator.
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
    """The command that repeats one judgement; what is no check's has none to name."""
    command = f"python -m conformance run --impl={shlex.quote(subject.implementation.name)} --case={subject.case.id}"
    if check in CHECKS_BY_NAME:
        command += f" --check={check}"
    alone = "plain" not in subject.rotation.pulled and "plain" in list_pullbacks(subject.implementation, subject.case)
    return (
        f"{command} --pullback={subject.rotation.pulled[0]}" if alone and check in _ROTATED_PULLBACK_CHECKS else command
    )


def _judge_checks(subject: Subject, checks: Iterable[Check], rejudge: Rejudger) -> Iterator[Record]:
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
        except ProcessLost as lost:  # what else this case is asked might cost a process each
            yield _build_record(subject, check.name, _build_lost_judgement(lost), margin, 0.0)
            return
    yield from _report_unrequested_death(subject, checks)


def _report_unrequested_death(subject: Subject, checks: Sequence[Check]) -> Iterator[Record]:
    """Yield an error if the kernel's process died of calls that were begun and that no check asked for."""
    try:
        subject.executor.settle()
    except ProcessLost as lost:
        yield _build_record(subject, checks[0].name, _build_lost_judgement(lost), None, 0.0)


def _ensure_discrimination(subject: Subject) -> tuple[Subject, Mapping[str, float]]:
    """The subject and its margins: asked everything, if what it is its turn to be asked does not discriminate."""
    margins = discrimination.compute_margins(subject)
    tells = not margins or discrimination.find_weakest_null(margins)[1] >= discrimination.REQUIRED_MARGIN
    if tells or subject.rotation == FULL_ROTATION:
        return subject, margins
    subject = dataclasses.replace(subject, rotation=FULL_ROTATION)
    return subject, discrimination.compute_margins(subject)


def _count_left_out(subject: Subject) -> dict[str, float]:
    """The figures of a case some of whose rows have more than one right answer; none if all have one."""
    count, rows = discrimination.count_undecided_rows(subject.problem)
    return {"undecided_rows": count, "rows": rows} if count else {}


def _build_undecided_judgement(left_out: Mapping[str, float]) -> Judgement:
    reason = (
        f"rounding could change which keys are chosen in {left_out['undecided_rows']:,} of {left_out['rows']:,} rows, "
        f"which leaves too few to judge by: at most {discrimination.MAX_UNDECIDED_SHARE:.0%} may be left out"
    )
    return Judgement(observable="case", verdict=records.UNJUDGED, reason=reason, figures=left_out)


def _time_check(check: Check, subject: Subject, rejudge: Rejudger) -> Iterator[tuple[Judgement, float]]:
    """The check's judgements, each with its share of the time: as they come, where none is made again."""
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
    """The check's judgements, failures judged again; what the implementation raises becomes one too."""
    found = list(_run_guarded(check, subject))
    interrupts.raise_if_stopped()
    found = rejudge.judge(check, subject, found)
    interrupts.raise_if_stopped()
    return found


def _run_guarded(check: Check, subject: Subject) -> Iterator[Judgement]:
    return catch_errors("all", lambda: check.run(subject))


def _judge_without_accelerator(
    subject: Subject, checks: Iterable[Check], reason: str, rejudge: Rejudger
) -> Iterator[Record]:
    """What needs no accelerator, if there is a call for it and the case is supported; the rest is unjudged."""
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
    yield _build_record(subject, "support", build_unsupported("case", reason), None, 0.0)
    for check in checks:
        if not check.scope.supported:
            start = time.perf_counter()
            try:
                found = _run_check(check, subject, rejudge)
            except ProcessLost as lost:
                found = [_build_lost_judgement(lost)]
            for judgement in found:
                yield _build_record(subject, check.name, judgement, None, time.perf_counter() - start)


def _build_lost_judgement(lost: ProcessLost) -> Judgement:
    return Judgement(observable="all", verdict=records.ERROR, reason=f"{lost}; the case was asked no further")


def _build_device_judgement(needed: int, count: int) -> Judgement:
    reason = (
        f"{needed} devices are needed, there are {count}; on CPU, XLA_FLAGS must have "
        f"--xla_force_host_platform_device_count={needed} (4 are set unless XLA_FLAGS is set already)"
    )
    return Judgement(observable="case", verdict=records.UNJUDGED, reason=reason)


def _build_record(subject: Subject, check: str, judgement: Judgement, margin: float | None, seconds: float) -> Record:
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
    """Where a result is wrong: looked for only now, since most of what fails is judged again, or tried otherwise."""
    failure = judgement.failure
    if failure is None:
        return {}
    found = find_pattern(failure)
    return {"pattern": found.words, "error_map": draw_error_map(failure, found.blocks) if failure.is_core else None}
