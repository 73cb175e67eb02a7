"""`run`: judge implementations, report, and say by the exit code whether all conform."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import time
from collections.abc import Callable, Sequence

import jax
from rich.console import Console

from conformance import environment, records
from conformance.calling import registry
from conformance.checks import BY_NAME, CHECKS, Check
from conformance.commands import lookup
from conformance.commands.errors import CannotJudge
from conformance.commands.outputs import command_line, outputs_of
from conformance.commands.progress import Progress
from conformance.contract import Implementation
from conformance.judging import plan, runner, settings
from conformance.judging.declarations import declared
from conformance.judging.job import Job
from conformance.judging.parallel import run_parallel
from conformance.judging.reach import few_blocks
from conformance.records import Record, RunInfo
from conformance.sensitivity import detection
from reports import summary, terminal


class _FirstFailure(Exception):  # noqa: N818 -- no error of this program
    """Something failed, and one failure is enough."""


def run(arguments: argparse.Namespace) -> int:
    """`run`: judge, report, and say by the exit code whether all conform."""
    started = time.perf_counter()
    _reject_contradictions(arguments)
    outputs = outputs_of(arguments)
    chosen = lookup.load_settings()
    implementations = _implementations(arguments, chosen)
    level = arguments.level or "quick"
    planned = _plan(arguments, implementations, level)
    if not planned.jobs:
        raise CannotJudge(_nothing_planned(arguments))
    console = Console(stderr=True)
    found: list[Record] = []
    interrupted = False
    with Progress(len(planned.jobs), console) as progress:

        def on_job(job: Job, judged: list[Record]) -> None:
            found.extend(judged)
            progress.advance(judged)
            if arguments.fail_fast and any(record.verdict in records.RED for record in judged):
                raise _FirstFailure

        jobs = planned.jobs
        if arguments.fail_fast:
            jobs = tuple(sorted(jobs, key=lambda job: not job.short))  # few programs each: a failure shows sooner
        try:
            _run_jobs(jobs, arguments.jobs, arguments.products, chosen, on_job, one_by_one=arguments.fail_fast)
        except _FirstFailure:
            console.print("stopped at the first failure, as --fail-fast says", style="yellow")
            interrupted = True
        except registry.ImplementationNotFound as error:  # a worker finds less than this process did
            raise CannotJudge(str(error)) from error
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # what was judged gets written, whatever else is pressed
            interrupted = True
    found = records.merge(found, runner.hardware_records(implementations))
    if _is_whole(arguments, interrupted):
        found = records.merge(found, chosen.stale(found, jax.__version__))
    info = RunInfo(
        command=command_line(),
        level="one case" if arguments.case is not None else "regressions" if arguments.regressions else level,
        environment=environment.describe(),
        tolerances=chosen.tolerances.rows(),
        coverage=list(planned.coverage),
        seconds=round(time.perf_counter() - started, 1),
        interrupted=interrupted,
        detection=detection.load(),
        declared={implementation.name: declared(implementation) for implementation in implementations},
        narrowed=_narrowed_to(arguments),
        few_blocks={} if interrupted else _few_blocks(arguments, implementations, found),
    )
    outputs.write(found, info)
    terminal.print_summary(found, info, Console())
    return _exit_code(found, implementations, arguments.require_platform, interrupted, console)


def _reject_contradictions(arguments: argparse.Namespace) -> None:
    if arguments.all and arguments.impl:
        raise CannotJudge("--all and --impl contradict each other: give one of them")
    if not arguments.all and not arguments.impl:
        raise CannotJudge("nothing to judge: give --impl=NAME (see `python -m conformance list`) or --all")
    if arguments.case is not None and (arguments.cases is not None or arguments.level or arguments.seed):
        raise CannotJudge("--case names one case, seed included: it cannot be combined with --cases, --level or --seed")
    if arguments.regressions and (arguments.case is not None or arguments.cases is not None or arguments.level):
        raise CannotJudge("--regressions names its cases: it cannot be combined with --case, --cases or --level")
    lookup.reject_no_workers(arguments.jobs)
    for seed in arguments.seed:
        lookup.reject_negative(seed)


def _implementations(arguments: argparse.Namespace, chosen: settings.Settings) -> list[Implementation]:
    names = registry.names() if arguments.all else chosen.members(arguments.impl)
    return [lookup.find(name, arguments.products) for name in names]


def _checks(arguments: argparse.Namespace) -> tuple[Check, ...]:
    for name in arguments.check:
        if name not in BY_NAME:
            raise CannotJudge(f"unknown check {name!r}: known are {', '.join(BY_NAME)}")
    return tuple(check for check in CHECKS if not arguments.check or check.name in arguments.check)


def _plan(arguments: argparse.Namespace, implementations: Sequence[Implementation], level: str) -> plan.Plan:
    checks = _checks(arguments)
    if arguments.case is not None:
        case = lookup.case(arguments.case)
        plans = [plan.single(implementation, case, checks) for implementation in implementations]
        return plan.Plan(tuple(job for one in plans for job in one.jobs), ())
    if arguments.regressions:
        return plan.regressions(implementations, checks)
    return plan.plan(implementations, level=level, seeds=arguments.seed or (0,), query=arguments.cases, checks=checks)


def _nothing_planned(arguments: argparse.Namespace) -> str:
    if arguments.cases is not None:
        return f"no case of the grid matches --cases={arguments.cases!r} (see `python -m conformance list cases`)"
    return f"no case asks for {', '.join(arguments.check) or 'any check'}"


def _run_jobs(
    jobs: Sequence[Job],
    workers: int | None,
    products: str | None,
    chosen: settings.Settings,
    on_job: Callable[[Job, list[Record]], None],
    *,
    one_by_one: bool = False,
) -> None:
    if workers is None:
        workers = (os.cpu_count() or 1) if jax.default_backend() == "cpu" and len(jobs) > 8 else 1
    if workers == 1:
        runner.Runner(chosen).run(jobs, on_job)
    else:
        run_parallel(jobs, workers, products, on_job, runner.Runner(chosen).lost, one_by_one=one_by_one)


def _few_blocks(
    arguments: argparse.Namespace, implementations: Sequence[Implementation], found: Sequence[Record]
) -> dict[str, str]:
    """Who was asked about few blocks though all cases were there for it."""
    if _narrowed_to(arguments):
        return {}
    return {implementation.name: few_blocks(implementation, found) for implementation in implementations}


def _narrowed_to(arguments: argparse.Namespace) -> str:
    """What is judged where it is not all that the level asks; empty if it is."""
    if arguments.case is not None:
        cases = "one case"
    elif arguments.regressions:
        cases = "the regressions"
    else:
        cases = "" if arguments.cases is None else f"--cases={shlex.quote(arguments.cases)}"
    return " ".join(filter(None, (cases, *(f"--check={name}" for name in arguments.check))))


def _is_whole(arguments: argparse.Namespace, interrupted: bool) -> bool:
    """Whether the run judged all that its level asks for, so that what did not fail can be called stale."""
    return not (_narrowed_to(arguments) or arguments.level == "smoke" or arguments.seed or interrupted)


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
    if required and not any(r.platform == required and r.verdict in records.JUDGED for r in found):
        console.print(f"--require-platform={required}: nothing was judged there", style="red")
        return 1
    if summary.DOES_NOT_CONFORM in standings.values():
        return 1
    if interrupted or summary.NOT_JUDGED in standings.values():
        return 2
    return 0


def judge_all(names: Sequence[str], level: str, seeds: Sequence[int], workers: int | None) -> list[Record]:
    """The records of whole grids, with progress."""
    found: list[Record] = []
    planned = plan.plan([lookup.find(name) for name in names], level=level, seeds=seeds)
    with Progress(len(planned.jobs), Console(stderr=True)) as progress:

        def on_job(job: Job, judged: list[Record]) -> None:
            found.extend(judged)
            progress.advance(judged)

        _run_jobs(planned.jobs, workers, None, lookup.load_settings(), on_job)
    return found
