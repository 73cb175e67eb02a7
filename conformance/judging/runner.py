"""Running jobs into records."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from conformance import interrupts, records
from conformance.asking.judgement import Judgement, guarded, told_apart, unsupported
from conformance.asking.subject import Subject
from conformance.asking.turn import EVERYTHING, pullbacks_of
from conformance.calling import registry
from conformance.calling.execution import Executor
from conformance.checks import BY_NAME, CHECKS, Check
from conformance.contract import Implementation
from conformance.judging import discrimination
from conformance.judging.job import Job
from conformance.judging.rejudge import CONFIRMED, Rejudge
from conformance.judging.settings import Settings
from conformance.records import Record
from conformance.runs import Run
from conformance.sandbox import loaded_files
from conformance.sandbox.kernel_process import ProcessLost
from conformance.sandbox.sandboxed_executor import SupportQueryFailed, create_executor
from conformance.truth.patterns.error_map import error_map
from conformance.truth.patterns.pattern import pattern

# Compiled programs take 0.3 to 2.5 MB each; beyond this many configurations the process is told to let go of them.
_CLEAR_EVERY = 60
# What compiles or interprets an accelerator's kernel, on any machine.
_NEED_NO_ACCELERATOR = frozenset(check.name for check in CHECKS if check.scope.without_accelerator is not None)
# What differentiates whichever of the two calls it is the case's turn to have differentiated.
_PULLS_BY_TURN = frozenset({"gradients_part", "primal", "poison", "independence", "linearity"})


class Runner:
    """Judges jobs one after the other, keeping compiled functions from one job to the next."""

    def __init__(self, settings: Settings, *, confirmed: float = CONFIRMED, options: Sequence[str] = ()) -> None:
        """A runner that judges failures again until `confirmed` of a check and result are confirmed; never with 0.

        `options` are those of the command that repeat how kernels are found and run.
        """
        self._settings = settings
        self._options = tuple(options)
        self._confirmed = confirmed
        self._executors: dict[str, Executor] = {}
        self._rejudges: dict[str, Rejudge] = {}
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
        subject = Subject(executor, job.case, self._settings.tolerances, job.turn)
        rejudge = self._rejudges.setdefault(job.implementation.name, Rejudge(executor, self._confirmed))
        self._done += 1
        if self._done % _CLEAR_EVERY == 0:
            jax.clear_caches()  # type: ignore[no-untyped-call] # untyped upstream
        if (absent := job.implementation.accelerator.absent) is not None:
            found = _absent(subject, job.checks, absent, rejudge)
        elif isinstance(reason := _reason(job), Judgement):
            found = iter([_record(subject, "support", reason, None, 0.0)])
        elif reason is not None:
            found = _declined(subject, job.checks, reason, rejudge)
        elif (count := executor.devices) < job.implementation.devices:
            found = iter([_record(subject, "devices", _too_few(job.implementation.devices, count), None, 0.0)])
        else:
            found = _judged(subject, job.checks, rejudge)
        for record in found:
            if later := executor.pop_later_files():
                record = dataclasses.replace(record, files=later)
            yield self._told(record)

    def _told(self, record: Record) -> Record:
        settled = self._settings.settle(record, jax.__version__)
        if "--in-process" in self._options and not registry.is_ours(record.implementation):
            settled = dataclasses.replace(settled, figures={**settled.figures, records.IN_PROCESS: 1.0})
        return dataclasses.replace(settled, reproduce=" ".join((settled.reproduce, *self._options)))

    def lost(self, job: Job) -> list[Record]:
        """The records of a job whose process died: an error for each of its checks."""
        subject = Subject(create_executor(job.implementation), job.case, self._settings.tolerances, job.turn)
        reason = "the process that judged this case died: the kernel crashed it, or it ran out of memory"
        died = Judgement(observable="all", verdict=records.ERROR, reason=reason)
        found = [_record(subject, check.name, died, None, 0.0) for check in job.checks]
        return [self._told(record) for record in found]


def _reason(job: Job) -> str | Judgement | None:
    """Why the case is not supported, none if it is; an error where the kernel cannot even say that."""
    try:
        return job.implementation.supports(job.case)
    except SupportQueryFailed as error:
        return Judgement(observable="case", verdict=records.ERROR, reason=str(error))


def hardware_records(implementations: Iterable[Implementation]) -> list[Record]:
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


def changed_file_records(run: Run, judged: Iterable[Record]) -> list[Record]:
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


def platform_of(implementation: Implementation, check: str | None = None) -> str:
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


def reproduction(subject: Subject, check: str) -> str:
    """The command that repeats one judgement; what is no check's has none to name."""
    command = f"python -m conformance run --impl={shlex.quote(subject.implementation.name)} --case={subject.case.id}"
    if check in BY_NAME:
        command += f" --check={check}"
    alone = "plain" not in subject.turn.pulled and "plain" in pullbacks_of(subject.implementation, subject.case)
    return f"{command} --pullback={subject.turn.pulled[0]}" if alone and check in _PULLS_BY_TURN else command


def _judged(subject: Subject, checks: Iterable[Check], rejudge: Rejudge) -> Iterator[Record]:
    margin = None
    checks = tuple(checks)
    compares = any(check.compares for check in checks)
    left_out = _left_out(subject) if compares else {}
    if left_out and left_out["undecided_rows"] > discrimination.MOST_UNDECIDED * left_out["rows"]:
        yield _record(subject, "discrimination", _undecided(left_out), margin, 0.0)
        return
    for check in checks:
        check.begins(subject)
    subject, margins = _discriminating(subject) if compares else (subject, {})
    if margins:
        null, margin = discrimination.weakest(margins)
        if not margin >= discrimination.REQUIRED_MARGIN:
            reason = (
                f"the case does not discriminate: the wrong result {null!r} would fall only "
                "{} times over the limit, {} are required".format(*told_apart(margin, discrimination.REQUIRED_MARGIN))
            )
            weak = Judgement(observable="case", verdict=records.UNJUDGED, reason=reason)
            yield _record(subject, "discrimination", weak, margin, 0.0)
            yield from _unasked_death(subject, checks)
            return
    for check in checks:
        try:
            for judgement, seconds in _timed(check, subject, rejudge):
                if left_out and check.compares:
                    judgement = dataclasses.replace(judgement, figures={**judgement.figures, **left_out})
                yield _record(subject, check.name, judgement, margin, seconds)
        except ProcessLost as lost:  # what else this case is asked might cost a process each
            yield _record(subject, check.name, _lost(lost), margin, 0.0)
            return
    yield from _unasked_death(subject, checks)


def _unasked_death(subject: Subject, checks: Sequence[Check]) -> Iterator[Record]:
    """Yield an error if the kernel's process died of calls that were begun and that no check asked for."""
    try:
        subject.executor.settle()
    except ProcessLost as lost:
        yield _record(subject, checks[0].name, _lost(lost), None, 0.0)


def _discriminating(subject: Subject) -> tuple[Subject, Mapping[str, float]]:
    """The subject and its margins: asked everything, if what it is its turn to be asked does not discriminate."""
    margins = discrimination.margins(subject)
    tells = not margins or discrimination.weakest(margins)[1] >= discrimination.REQUIRED_MARGIN
    if tells or subject.turn == EVERYTHING:
        return subject, margins
    subject = dataclasses.replace(subject, turn=EVERYTHING)
    return subject, discrimination.margins(subject)


def _left_out(subject: Subject) -> dict[str, float]:
    """The figures of a case some of whose rows have more than one right answer; none if all have one."""
    count, rows = discrimination.undecided_rows(subject.problem)
    return {"undecided_rows": count, "rows": rows} if count else {}


def _undecided(left_out: Mapping[str, float]) -> Judgement:
    reason = (
        f"rounding could change which keys are chosen in {left_out['undecided_rows']:,} of {left_out['rows']:,} rows, "
        f"which leaves too few to judge by: at most {discrimination.MOST_UNDECIDED:.0%} may be left out"
    )
    return Judgement(observable="case", verdict=records.UNJUDGED, reason=reason, figures=left_out)


def _timed(check: Check, subject: Subject, rejudge: Rejudge) -> Iterator[tuple[Judgement, float]]:
    """The check's judgements, each with its share of the time: as they come, where none is made again."""
    start = time.perf_counter()
    if rejudge.never:
        for judgement in _first_answers(check, subject):
            interrupts.check()
            yield judgement, time.perf_counter() - start
            start = time.perf_counter()
        return
    judgements = _answers(check, subject, rejudge)
    seconds = (time.perf_counter() - start) / max(1, len(judgements))
    for judgement in judgements:
        yield judgement, seconds


def _answers(check: Check, subject: Subject, rejudge: Rejudge) -> list[Judgement]:
    """The check's judgements, failures judged again; what the implementation raises becomes one too."""
    found = list(_first_answers(check, subject))
    interrupts.check()
    found = rejudge.judge(check, subject, found)
    interrupts.check()
    return found


def _first_answers(check: Check, subject: Subject) -> Iterator[Judgement]:
    return guarded("all", lambda: check.run(subject))


def _absent(subject: Subject, checks: Iterable[Check], reason: str, rejudge: Rejudge) -> Iterator[Record]:
    """What needs no accelerator, if there is a call for it and the case is supported; the rest is unjudged."""
    implementation = subject.implementation
    stand_ins = {check: check.scope.without_accelerator for check in checks}
    possible = [check for check, stand_in in stand_ins.items() if stand_in and stand_in(implementation) is not None]
    if possible and implementation.supports(subject.case) is None:
        yield from _judged(subject, possible, rejudge)
        if len(possible) == len(stand_ins):
            return
    unjudged = Judgement(observable="case", verdict=records.UNJUDGED, reason=reason)
    yield _record(subject, "hardware", unjudged, None, 0.0)


def _declined(subject: Subject, checks: Iterable[Check], reason: str, rejudge: Rejudge) -> Iterator[Record]:
    yield _record(subject, "support", unsupported("case", reason), None, 0.0)
    for check in checks:
        if not check.scope.supported:
            start = time.perf_counter()
            try:
                found = _answers(check, subject, rejudge)
            except ProcessLost as lost:
                found = [_lost(lost)]
            for judgement in found:
                yield _record(subject, check.name, judgement, None, time.perf_counter() - start)


def _lost(lost: ProcessLost) -> Judgement:
    return Judgement(observable="all", verdict=records.ERROR, reason=f"{lost}; the case was asked no further")


def _too_few(needed: int, count: int) -> Judgement:
    reason = (
        f"{needed} devices are needed, there are {count}; on CPU, XLA_FLAGS must have "
        f"--xla_force_host_platform_device_count={needed} (4 are set unless XLA_FLAGS is set already)"
    )
    return Judgement(observable="case", verdict=records.UNJUDGED, reason=reason)


def _record(subject: Subject, check: str, judgement: Judgement, margin: float | None, seconds: float) -> Record:
    implementation = subject.implementation
    return Record(
        implementation=implementation.name,
        platform=platform_of(implementation, check),
        case=subject.case.id,
        check=check,
        dtype=subject.case.dtype,
        features=subject.case.features,
        margin=margin,
        reproduce=reproduction(subject, check),
        seconds=round(seconds, 4),
        **{name: value for name, value in vars(judgement).items() if name != "failure"},
        **_seen(judgement),
    )


def _seen(judgement: Judgement) -> dict[str, Any]:
    """Where a result is wrong: looked for only now, since most of what fails is judged again, or tried otherwise."""
    failure = judgement.failure
    if failure is None:
        return {}
    found = pattern(failure)
    return {"pattern": found.words, "error_map": error_map(failure, found.blocks) if failure.is_core else None}
