"""`run`: judge implementations, report, and say by the exit code whether all conform."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from rich.console import Console

from conformance import interrupts, records
from conformance.asking.turn import EVERYTHING, Turn
from conformance.calling import registry
from conformance.checks import BY_NAME, CHECKS, Check
from conformance.commands import annotate, compare, lookup
from conformance.commands.errors import CannotJudge
from conformance.commands.outputs import Outputs, command_line, outputs_of, step_summary, writable
from conformance.commands.probes import budget, diagnose
from conformance.commands.progress import Progress
from conformance.commands.streams import OutputFailed
from conformance.contract import Implementation
from conformance.judging import flag_share, plan, provenance, runner, settings
from conformance.judging.evidence import gather
from conformance.judging.job import Job
from conformance.judging.journal import CannotWrite, Journal, Unlike, from_file, to_go_on
from conformance.judging.parallel import run_parallel
from conformance.records import Record
from conformance.runs import COMPLETE, FAILED, INTERRUPTED, Run
from conformance.sandbox.kernel_options import KernelOptions
from conformance.sensitivity import detection
from reports import changes_page, summary, terminal

# Options that say what to judge.
_QUERY = (
    "impl",
    "all",
    "level",
    "case",
    "cases",
    "regressions",
    "problem",
    "full_size",
    "check",
    "pullback",
    "seed",
    "products",
    "in_process",
    "timeout",
    "memory",
)
# Processes share a GPU: what they take time for is compiling, on the CPU. A TPU belongs to one alone.
_FEW = 8  # jobs that are done before other processes have begun
_MOST_WORKERS = {"cpu": sys.maxsize, "gpu": 8}


class _FirstFailure(Exception):  # noqa: N818 -- no error of this program
    """Something failed, and one failure is enough."""


def run(arguments: argparse.Namespace) -> int:
    """`run`: judge, report, and say by the exit code whether all conform."""
    started = time.perf_counter()
    before = _taken_up(arguments)
    lookup.reject_contradictions(arguments)
    outputs = dataclasses.replace(outputs_of(arguments), step=step_summary())
    baseline = _baseline(arguments, outputs)
    chosen = lookup.load_settings()
    kernels = lookup.kernels(arguments)
    implementations = _implementations(arguments, chosen, kernels)
    notes = lookup.draw_seeds(arguments)
    planned = _plan(arguments, implementations, arguments.level or "quick")
    if not planned.jobs:
        raise CannotJudge(_nothing_planned(arguments))
    described = _described(arguments, implementations, planned, chosen, kernels)
    kept: dict[int, tuple[Record, ...]] = {}
    if before is not None:
        try:
            described, kept = to_go_on(before, described)
            notes = [*notes, from_file(len(kept))]
        except Unlike as error:
            raise CannotJudge(f"--resume: {error}") from error
    console = Console(stderr=True)
    interrupts.finish()  # from here on a signal ends in a summary and a page
    try:
        journal = Journal(
            outputs.journals if before is None else _with_first(before, outputs.journals), described, kept
        )
    except CannotWrite as error:
        raise CannotJudge(str(error)) from error
    shrunk: list[str] = []
    try:
        how, reason = _written_down(arguments, planned.jobs, implementations, chosen, journal, started, console, shrunk)
    except CannotWrite as error:
        how, reason = FAILED, f"{error}; what was judged before is in it"
        journal.abandon(reason)
    found, info = gather([journal.recorded], command=described.command, detection=detection.load())
    info = diagnose.told(info, found)
    outputs.write(found, info)
    if how == FAILED:
        raise CannotJudge(reason)
    terminal.print_summary(found, info, Console(), str(arguments.report or ""))
    for line in shrunk:
        Console().print(line, highlight=False, markup=False, soft_wrap=True)
    for note in [*notes, *(f"{name} {one.place}" for name, one in described.kernels.items() if one.place)]:
        console.print(note, style="yellow", highlight=False, soft_wrap=True)
    code = _exit_code(found, implementations, arguments.require_platform, how != COMPLETE, console)
    changed = None
    if baseline is not None:
        changed = compare.compared(baseline, compare.side_of([journal.recorded], "this run"))
        changes_page.print_comparison(changed, Console())
    print("".join(f"{line}\n" for line in annotate.annotated(found, changed, info.probes)), end="")
    return code or (1 if changed is not None and changed.regressions else 0)


def _baseline(arguments: argparse.Namespace, outputs: Outputs) -> compare.Side | None:
    """The run to compare with, read before anything is written."""
    if arguments.baseline is None:
        return None
    written = [path.resolve() for path in outputs.journals]
    if lookup.input_file(arguments.baseline).resolve() in written:
        raise CannotJudge(f"--baseline={arguments.baseline} is written by this run too: give the records another file")
    return compare.side(arguments.baseline)


def _written_down(
    arguments: argparse.Namespace,
    jobs: Sequence[Job],
    implementations: Sequence[Implementation],
    chosen: settings.Settings,
    journal: Journal,
    started: float,
    console: Console,
    shrunk: list[str],
) -> tuple[str, str]:
    """Judge, and write down what comes of it to the end; how it ended, and why if not by itself."""
    try:
        how, reason = _judge(arguments, jobs, chosen, journal, console)
        if how == COMPLETE and (missing := _missing(arguments, jobs, journal)):
            how, reason = FAILED, f"{missing:,} of its jobs have no records"
        if how == COMPLETE and interrupts.received() is None:
            shrunk += _probed(arguments, implementations, chosen, journal, started, console)
    except CannotWrite:
        raise
    except Exception as error:  # an error of ours: it is raised, and what was judged stays
        with contextlib.suppress(CannotWrite):
            journal.end(FAILED, reason=f"{type(error).__name__}: {error}", seconds=time.perf_counter() - started)
        raise
    journal.add(runner.hardware_records(implementations))
    journal.add(flag_share.find_excess(journal.recorded.records))
    journal.add(runner.changed_file_records(journal.run, journal.recorded.records))
    if how == COMPLETE and _is_whole(arguments):
        journal.add(chosen.stale(journal.recorded.records, jax.__version__))
    journal.end(how, reason=reason, seconds=time.perf_counter() - started)
    return how, reason


def _missing(arguments: argparse.Namespace, jobs: Sequence[Job], journal: Journal) -> int:
    """Count the jobs of this run, or of this shard of it, that are not done."""
    numbers = {id(job): number for number, job in enumerate(jobs)}
    mine = plan.sharded(jobs, *arguments.shard) if arguments.shard else jobs
    done = journal.recorded.done
    return sum(numbers[id(job)] not in done for job in mine)


def _judge(
    arguments: argparse.Namespace,
    jobs: Sequence[Job],
    chosen: settings.Settings,
    journal: Journal,
    console: Console,
) -> tuple[str, str]:
    """Judge what is not judged yet; how it ended, and why if not by itself."""
    done = journal.recorded.done
    numbers = {id(job): number for number, job in enumerate(jobs)}
    mine = plan.sharded(jobs, *arguments.shard) if arguments.shard else tuple(jobs)
    waiting = [job for job in mine if numbers[id(job)] not in done]
    before = [done[numbers[id(job)]] for job in mine if numbers[id(job)] in done]
    if arguments.fail_fast:
        waiting.sort(key=lambda job: not job.short)  # few programs each: a failure shows sooner
    try:
        with interrupts.stoppable(), Progress(len(waiting) + len(before), console, before) as progress:
            interrupts.check()

            def on_job(job: Job, judged: list[Record]) -> None:
                journal.job(numbers[id(job)], judged)
                progress.advance(judged)
                if arguments.fail_fast and any(record.verdict in records.RED for record in judged):
                    raise _FirstFailure

            if waiting:
                kernels = lookup.kernels(arguments)
                _run_jobs(waiting, arguments.jobs, kernels, chosen, on_job, one_by_one=arguments.fail_fast)
    except _FirstFailure:
        console.print("stopped at the first failure, as --fail-fast says", style="yellow")
        return INTERRUPTED, "stopped at the first failure, as --fail-fast says"
    except registry.ImplementationNotFound as error:  # a worker finds less than this process did
        return FAILED, str(error)
    except KeyboardInterrupt:
        return INTERRUPTED, interrupts.reason()
    except OutputFailed as error:
        return INTERRUPTED, str(error)
    return COMPLETE, ""


def _probed(
    arguments: argparse.Namespace,
    implementations: Sequence[Implementation],
    chosen: settings.Settings,
    journal: Journal,
    started: float,
    console: Console,
) -> list[str]:
    """Confirm what was found, and shrink it if asked to: what to say of that. Ctrl-C ends no more than this."""
    if not any(record.verdict in records.RED for record in journal.recorded.records):
        return []
    told: list[str] = []
    here = runner.Runner(chosen, options=lookup.kernels(arguments).options)
    if arguments.case is None and not arguments.problem:
        seconds = budget.Budget(arguments.confirm_seconds, arguments.diagnose_seconds)
        spent = time.perf_counter() - started
        budget.ask(journal, implementations, here, seconds, spent=spent, console=console)
    if arguments.shrink and interrupts.received() is None:
        from conformance.commands.probes import shrink  # imported late: nothing else here needs Hypothesis

        with interrupts.until_stopped():
            for line in shrink.shrink(journal, implementations, here, console):
                told.append(line)  # one by one: what was found before Ctrl-C is told
    return told


def _described(
    arguments: argparse.Namespace,
    implementations: Sequence[Implementation],
    planned: plan.Plan,
    chosen: settings.Settings,
    kernels: KernelOptions,
) -> Run:
    """What holds for all records of the run."""
    level = "one case" if arguments.case is not None else "regressions" if arguments.regressions else arguments.level
    level = "a named problem" if arguments.problem and arguments.case is None else level
    named = arguments.case is not None or arguments.regressions or arguments.problem
    return provenance.recorded_run(
        implementations,
        planned,
        command=command_line(),
        level=level or "quick",
        seeds=() if named else tuple(arguments.seed) or (0,),
        narrowed=_narrowed_to(arguments),
        query={name: getattr(arguments, name) for name in _QUERY},
        shard="/".join(map(str, arguments.shard or ())),
        limits=chosen.tolerances.rows(),
        kernels=kernels,
    )


def _taken_up(arguments: argparse.Namespace) -> Path | None:
    """The file that `--resume` names; what to judge is then taken from it, unless it is named again."""
    if arguments.resume is None:
        return None
    path = Path(arguments.resume)
    found = [one.run for one in lookup.recorded(arguments.resume)]
    if len(found) != 1 or found[0] is None:
        what = f"{len(found)} runs" if len(found) > 1 else "no run record"
        raise CannotJudge(f"--resume={arguments.resume} has {what}: it takes the file of one run")
    query = found[0].query
    if not any(getattr(arguments, name) for name in _QUERY):
        for name in _QUERY:
            setattr(arguments, name, query.get(name, getattr(arguments, name)))
        arguments.shard = tuple(map(int, found[0].shard.split("/"))) if found[0].shard else None
    if not any(getattr(arguments, name) for name in ("impl", "all")):
        raise CannotJudge(f"--resume={arguments.resume} is no run of this command: give what it was given")
    writable(arguments.resume, "resume")
    return path


def _with_first(first: Path, others: Sequence[Path]) -> list[Path]:
    """The file that is gone on with, and those that are to have the same."""
    return [first, *(path for path in others if path.resolve() != first.resolve())]


def _implementations(
    arguments: argparse.Namespace, chosen: settings.Settings, kernels: KernelOptions
) -> list[Implementation]:
    names = registry.names() if arguments.all else chosen.members(arguments.impl)
    return [lookup.find(name, kernels) for name in names]


def _checks(arguments: argparse.Namespace) -> tuple[Check, ...]:
    for name in arguments.check:
        if name not in BY_NAME:
            if "," in name:
                raise CannotJudge(f"{name!r} is several names: give --check once for each")
            raise CannotJudge(f"unknown check {name!r}: known are {', '.join(BY_NAME)}")
    return tuple(check for check in CHECKS if not arguments.check or check.name in arguments.check)


def _plan(arguments: argparse.Namespace, implementations: Sequence[Implementation], level: str) -> plan.Plan:
    checks = _checks(arguments)
    if arguments.problem:
        return plan.problem(implementations, lookup.problem_cases(arguments), checks)
    if arguments.case is not None:
        case = lookup.case(arguments.case)
        turn = Turn(pulled=(arguments.pullback,)) if arguments.pullback else EVERYTHING
        plans = [plan.single(implementation, case, checks, turn) for implementation in implementations]
        return plan.Plan(tuple(job for one in plans for job in one.jobs), ())
    if arguments.regressions:
        return plan.regressions(implementations, checks)
    return plan.plan(implementations, level=level, seeds=arguments.seed or (0,), query=arguments.cases, checks=checks)


def _nothing_planned(arguments: argparse.Namespace) -> str:
    if arguments.problem and arguments.cases is not None:
        return f"no case of {arguments.problem} matches --cases={arguments.cases!r}"
    if arguments.cases is not None:
        return f"no case of the grid matches --cases={arguments.cases!r} (see `python -m conformance list cases`)"
    return f"no case asks for {', '.join(arguments.check) or 'any check'}"


def _run_jobs(
    jobs: Sequence[Job],
    workers: int | None,
    kernels: KernelOptions,
    chosen: settings.Settings,
    on_job: Callable[[Job, list[Record]], None],
    *,
    one_by_one: bool = False,
) -> None:
    if workers is None:
        workers = _workers(len(jobs))
    here = runner.Runner(chosen, options=kernels.options)
    if workers == 1:
        here.run(jobs, on_job)
    else:
        run_parallel(jobs, workers, kernels, on_job, here.lost, one_by_one=one_by_one)


def _workers(jobs: int) -> int:
    """How many processes judge so many jobs, where nobody says it."""
    most = _MOST_WORKERS.get(jax.default_backend(), 1)
    return min(os.cpu_count() or 1, most) if jobs > _FEW else 1


def _narrowed_to(arguments: argparse.Namespace) -> str:
    """What is judged where it is not all that the level asks; empty if it is."""
    size = " --full-size" if arguments.full_size else ""
    problem = f"--problem={arguments.problem}{size}" if arguments.problem else ""
    if arguments.case is not None:
        cases = "one case"
    elif arguments.regressions:
        cases = "the regressions"
    else:
        cases = "" if arguments.cases is None else f"--cases={shlex.quote(arguments.cases)}"
    pullback = f"--pullback={arguments.pullback}" if arguments.pullback else ""
    return " ".join(filter(None, (problem, cases, *(f"--check={name}" for name in arguments.check), pullback)))


def _is_whole(arguments: argparse.Namespace) -> bool:
    """Whether the run judges all that its level asks for, so that what did not fail can be called stale."""
    return not (_narrowed_to(arguments) or arguments.level == "smoke" or arguments.seed or arguments.shard)


def _exit_code(
    found: Sequence[Record],
    implementations: Sequence[Implementation],
    required: str | None,
    interrupted: bool,
    console: Console,
) -> int:
    judged = {record.implementation for record in found if record.verdict in records.JUDGED}
    present = [i for i in implementations if i.accelerator.absent is None or i.name in judged]
    # What cannot run here is shown as unjudged; it is no reason to fail a run that judged the others.
    standings = {
        implementation.name: summary.conformity([r for r in found if r.implementation == implementation.name])
        for implementation in present or implementations
    }
    is_missing = bool(required) and not any(r.platform == required and r.verdict in records.JUDGED for r in found)
    if is_missing:
        console.print(f"--require-platform={required}: nothing was judged there", style="red")
    if summary.DOES_NOT_CONFORM in standings.values():
        return 1
    if is_missing or interrupted or summary.NOT_JUDGED in standings.values():
        return 2
    return 0


def judge_all(names: Sequence[str], level: str, seeds: Sequence[int], workers: int | None) -> list[Record]:
    """The records of whole grids, with progress."""
    found: list[Record] = []
    kernels = KernelOptions()
    planned = plan.plan([lookup.find(name, kernels) for name in names], level=level, seeds=seeds)
    with Progress(len(planned.jobs), Console(stderr=True)) as progress:

        def on_job(job: Job, judged: list[Record]) -> None:
            found.extend(judged)
            progress.advance(judged)

        _run_jobs(planned.jobs, workers, kernels, lookup.load_settings(), on_job)
    return found
