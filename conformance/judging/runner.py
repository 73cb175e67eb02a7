"""Running jobs into records."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax

from conformance import records
from conformance.asking.judgement import Judgement, guarded, unsupported
from conformance.asking.subject import Subject
from conformance.asking.turn import EVERYTHING
from conformance.calling.execution import Executor
from conformance.checks import CHECKS, Check
from conformance.contract import Implementation
from conformance.judging import discrimination, interrupts
from conformance.judging.again import CONFIRMED, Again
from conformance.judging.job import Job
from conformance.judging.settings import Settings
from conformance.records import Record

# Compiled programs take 0.3 to 2.5 MB each; beyond this many configurations the process is told to let go of them.
_CLEAR_EVERY = 60
# What compiles or interprets an accelerator's kernel, on any machine.
_NEED_NO_ACCELERATOR = frozenset(check.name for check in CHECKS if check.scope.without_accelerator is not None)


class Runner:
    """Judges jobs one after the other, keeping compiled functions from one job to the next."""

    def __init__(self, settings: Settings, *, confirmed: float = CONFIRMED) -> None:
        """A runner that judges failures again until `confirmed` of a check and result are confirmed; never with 0."""
        self._settings = settings
        self._confirmed = confirmed
        self._executors: dict[str, Executor] = {}
        self._again: dict[str, Again] = {}
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
        executor = self._executors.setdefault(job.implementation.name, Executor(job.implementation))
        subject = Subject(executor, job.case, self._settings.tolerances, job.turn)
        again = self._again.setdefault(job.implementation.name, Again(executor, self._confirmed))
        self._done += 1
        if self._done % _CLEAR_EVERY == 0:
            jax.clear_caches()  # type: ignore[no-untyped-call] # untyped upstream
        if (absent := job.implementation.accelerator.absent) is not None:
            found = _absent(subject, job.checks, absent, again)
        elif (reason := job.implementation.supports(job.case)) is not None:
            found = _declined(subject, job.checks, reason, again)
        elif (count := len(jax.devices())) < job.implementation.devices:
            found = iter([_record(subject, "devices", _too_few(job.implementation.devices, count), None, 0.0)])
        else:
            found = _judged(subject, job.checks, again)
        for record in found:
            yield self._settings.settle(record, jax.__version__)

    def lost(self, job: Job) -> list[Record]:
        """The records of a job whose process died: an error for each of its checks."""
        subject = Subject(Executor(job.implementation), job.case, self._settings.tolerances)
        reason = "the process that judged this case died: the kernel crashed it, or it ran out of memory"
        died = Judgement(observable="all", verdict=records.ERROR, reason=reason)
        found = [_record(subject, check.name, died, None, 0.0) for check in job.checks]
        return [self._settings.settle(record, jax.__version__) for record in found]


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
            reproduce=f"python -m conformance run --impl={name} --require-platform={accelerator.platform}",
        )
        for name, accelerator in kernels
        if accelerator.platform is not None and accelerator.interpreted and accelerator.absent is None
    ]


def platform_of(implementation: Implementation, check: str | None = None) -> str:
    """The platform that judgements are made on: the JAX backend, marked where the kernel is interpreted.

    Of a kernel that cannot run here, the platform that it is for, but for the checks that need no accelerator.
    """
    accelerator = implementation.accelerator
    if accelerator.absent is None:
        return _backend(interpreted=accelerator.interpreted)
    if check in _NEED_NO_ACCELERATOR or accelerator.platform is None:
        return _backend(interpreted=True)
    return accelerator.platform


def _backend(*, interpreted: bool) -> str:
    return f"{jax.default_backend()}-interpret" if interpreted else jax.default_backend()


def reproduction(implementation: str, case: str, check: str) -> str:
    """The command that repeats one judgement."""
    return f"python -m conformance run --impl={shlex.quote(implementation)} --case={case} --check={check}"


def _judged(subject: Subject, checks: Iterable[Check], again: Again) -> Iterator[Record]:
    margin = None
    checks = tuple(checks)
    compares = any(check.compares for check in checks)
    left_out = _left_out(subject) if compares else {}
    if left_out and left_out["undecided_rows"] > discrimination.MOST_UNDECIDED * left_out["rows"]:
        yield _record(subject, "discrimination", _undecided(left_out), margin, 0.0)
        return
    subject, margins = _discriminating(subject) if compares else (subject, {})
    if margins:
        null, margin = discrimination.weakest(margins)
        if not margin >= discrimination.REQUIRED_MARGIN:
            reason = (
                f"the case does not discriminate: the wrong result {null!r} would fall only {margin:.2g} times over "
                f"the limit, {discrimination.REQUIRED_MARGIN:g} are required"
            )
            weak = Judgement(observable="case", verdict=records.UNJUDGED, reason=reason)
            yield _record(subject, "discrimination", weak, margin, 0.0)
            return
    for check in checks:
        for judgement, seconds in _timed(check, subject, again):
            if left_out and check.compares:
                judgement = dataclasses.replace(judgement, figures={**judgement.figures, **left_out})
            yield _record(subject, check.name, judgement, margin, seconds)


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


def _timed(check: Check, subject: Subject, again: Again) -> Iterator[tuple[Judgement, float]]:
    """The check's judgements, each with its share of the time: as they come, where none is made again."""
    start = time.perf_counter()
    if again.never:
        for judgement in _first_answers(check, subject):
            interrupts.check()
            yield judgement, time.perf_counter() - start
            start = time.perf_counter()
        return
    judgements = _answers(check, subject, again)
    seconds = (time.perf_counter() - start) / max(1, len(judgements))
    for judgement in judgements:
        yield judgement, seconds


def _answers(check: Check, subject: Subject, again: Again) -> list[Judgement]:
    """The check's judgements, failures judged again; what the implementation raises becomes one too."""
    found = list(_first_answers(check, subject))
    interrupts.check()
    found = again.judged(check, subject, found)
    interrupts.check()
    return found


def _first_answers(check: Check, subject: Subject) -> Iterator[Judgement]:
    return guarded("all", lambda: check.run(subject))


def _absent(subject: Subject, checks: Iterable[Check], reason: str, again: Again) -> Iterator[Record]:
    """What needs no accelerator, if there is a call for it and the case is supported; the rest is unjudged."""
    implementation = subject.implementation
    stand_ins = {check: check.scope.without_accelerator for check in checks}
    possible = [check for check, stand_in in stand_ins.items() if stand_in and stand_in(implementation) is not None]
    if possible and implementation.supports(subject.case) is None:
        yield from _judged(subject, possible, again)
        if len(possible) == len(stand_ins):
            return
    unjudged = Judgement(observable="case", verdict=records.UNJUDGED, reason=reason)
    command = f"python -m conformance run --impl={shlex.quote(implementation.name)} --case={subject.case.id}"
    yield dataclasses.replace(_record(subject, "hardware", unjudged, None, 0.0), reproduce=command)


def _declined(subject: Subject, checks: Iterable[Check], reason: str, again: Again) -> Iterator[Record]:
    yield _record(subject, "support", unsupported("case", reason), None, 0.0)
    for check in checks:
        if not check.scope.supported and not subject.implementation.refuses_by_signature:
            start = time.perf_counter()
            for judgement in _answers(check, subject, again):
                yield _record(subject, check.name, judgement, None, time.perf_counter() - start)


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
        reproduce=reproduction(implementation.name, subject.case.id, check),
        seconds=round(seconds, 4),
        **dataclasses.asdict(judgement) | {"worst": judgement.worst},
    )
