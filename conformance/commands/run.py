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
from conformance.check_api.rotation import FULL_ROTATION, Rotation
from conformance.checks import CHECKS, CHECKS_BY_NAME, Check
from conformance.commands import argument_lookup, compare, run_annotations
from conformance.commands.command_errors import CannotJudge
from conformance.commands.probes import bug_diagnosis, follow_up
from conformance.commands.progress_display import RunProgress
from conformance.commands.run_outputs import (
    Outputs,
    check_outputs,
    check_writable,
    find_step_summary,
    format_command_line,
)
from conformance.commands.standard_streams import OutputFailed
from conformance.contract import Implementation
from conformance.execution import implementation_registry
from conformance.judging import flag_share, provenance, run_plan, runner, settings
from conformance.judging.job import Job
from conformance.judging.journal import (
    Journal,
    JournalWriteError,
    ResumeMismatchError,
    describe_resumed_jobs,
    load_resumed_run,
)
from conformance.judging.parallel_judging import judge_in_parallel
from conformance.judging.run_aggregation import aggregate_runs
from conformance.records import Record
from conformance.runs import COMPLETE, FAILED, INTERRUPTED, Run
from conformance.sandbox.kernel_options import KernelOptions
from conformance.sensitivity import detection_table
from reports import changes_page, conformity, terminal
from reports.page_model import build_summary

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
    argument_lookup.reject_contradictions(arguments)
    outputs = dataclasses.replace(check_outputs(arguments), step=find_step_summary())
    baseline = _baseline(arguments, outputs)
    chosen = argument_lookup.load_project_settings()
    kernels = argument_lookup.build_kernel_options(arguments)
    implementations = _implementations(arguments, chosen, kernels)
    notes = argument_lookup.draw_seeds(arguments)
    planned = _plan(arguments, implementations, arguments.level or "quick")
    if not planned.jobs:
        raise CannotJudge(_nothing_planned(arguments))
    described = _described(arguments, implementations, planned, chosen, kernels)
    kept: dict[int, tuple[Record, ...]] = {}
    if before is not None:
        try:
            described, kept = load_resumed_run(before, described)
            notes = [*notes, describe_resumed_jobs(len(kept))]
        except ResumeMismatchError as error:
            raise CannotJudge(f"--resume: {error}") from error
    console = Console(stderr=True)
    interrupts.stop_raising()  # from here on a signal ends in a summary and a page
    try:
        journal = Journal(
            outputs.journals if before is None else _with_first(before, outputs.journals), described, kept
        )
    except JournalWriteError as error:
        raise CannotJudge(str(error)) from error
    shrunk: list[str] = []
    try:
        how, reason = _written_down(arguments, planned.jobs, implementations, chosen, journal, started, console, shrunk)
    except JournalWriteError as error:
        how, reason = FAILED, f"{error}; what was judged before is in it"
        journal.abandon(reason)
    found, info = aggregate_runs([journal.recorded], command=described.command, detection=detection_table.load_table())
    info = bug_diagnosis.add_diagnoses(info, found)
    summary = build_summary(found, info)
    outputs.write(summary)
    if how == FAILED:
        raise CannotJudge(reason)
    terminal.print_summary(summary, Console(), str(arguments.report or ""))
    for line in shrunk:
        Console().print(line, highlight=False, markup=False, soft_wrap=True)
    for note in [*notes, *(f"{name} {one.place}" for name, one in described.kernels.items() if one.place)]:
        console.print(note, style="yellow", highlight=False, soft_wrap=True)
    code = _exit_code(found, implementations, arguments.require_platform, how != COMPLETE, console)
    changed = None
    if baseline is not None:
        changed = compare.compare_runs(baseline, compare.gather_compared_runs([journal.recorded], "this run"))
        changes_page.print_comparison(changed, Console())
    print("".join(f"{line}\n" for line in run_annotations.annotate_run(found, changed, info.probes)), end="")
    return code or (1 if changed is not None and changed.regressions else 0)


def _baseline(arguments: argparse.Namespace, outputs: Outputs) -> compare.ComparedRuns | None:
    """The run to compare with, read before anything is written."""
    if arguments.baseline is None:
        return None
    written = [path.resolve() for path in outputs.journals]
    if argument_lookup.parse_input_path(arguments.baseline).resolve() in written:
        raise CannotJudge(f"--baseline={arguments.baseline} is written by this run too: give the records another file")
    return compare.read_compared_runs(arguments.baseline)


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
        if how == COMPLETE and interrupts.get_received_signal() is None:
            shrunk += _probed(arguments, implementations, chosen, journal, started, console)
    except JournalWriteError:
        raise
    except Exception as error:  # an error of ours: it is raised, and what was judged stays
        with contextlib.suppress(JournalWriteError):
            journal.end(FAILED, reason=f"{type(error).__name__}: {error}", seconds=time.perf_counter() - started)
        raise
    journal.add(runner.build_hardware_records(implementations))
    journal.add(flag_share.find_excess(journal.recorded.records))
    journal.add(runner.build_changed_file_records(journal.run, journal.recorded.records))
    if how == COMPLETE and _is_whole(arguments):
        journal.add(chosen.stale(journal.recorded.records, jax.__version__))
    journal.end(how, reason=reason, seconds=time.perf_counter() - started)
    return how, reason


def _missing(arguments: argparse.Namespace, jobs: Sequence[Job], journal: Journal) -> int:
    """Count the jobs of this run, or of this shard of it, that are not done."""
    numbers = {id(job): number for number, job in enumerate(jobs)}
    mine = run_plan.select_shard(jobs, *arguments.shard) if arguments.shard else jobs
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
    mine = run_plan.select_shard(jobs, *arguments.shard) if arguments.shard else tuple(jobs)
    waiting = [job for job in mine if numbers[id(job)] not in done]
    before = [done[numbers[id(job)]] for job in mine if numbers[id(job)] in done]
    if arguments.fail_fast:
        waiting.sort(key=lambda job: not job.short)  # few programs each: a failure shows sooner
    try:
        with interrupts.raise_on_signal(), RunProgress(len(waiting) + len(before), console, before) as progress:
            interrupts.raise_if_stopped()

            def on_job(job: Job, judged: list[Record]) -> None:
                journal.job(numbers[id(job)], judged)
                progress.advance(judged)
                if arguments.fail_fast and any(record.verdict in records.RED for record in judged):
                    raise _FirstFailure

            if waiting:
                kernels = argument_lookup.build_kernel_options(arguments)
                _run_jobs(waiting, arguments.jobs, kernels, chosen, on_job, one_by_one=arguments.fail_fast)
    except _FirstFailure:
        console.print("stopped at the first failure, as --fail-fast says", style="yellow")
        return INTERRUPTED, "stopped at the first failure, as --fail-fast says"
    except implementation_registry.ImplementationNotFound as error:  # a worker finds less than this process did
        return FAILED, str(error)
    except KeyboardInterrupt:
        return INTERRUPTED, interrupts.describe_signal()
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
    here = runner.Runner(chosen, options=argument_lookup.build_kernel_options(arguments).options)
    if arguments.case is None and not arguments.problem:
        seconds = follow_up.FollowUpSeconds(arguments.confirm_seconds, arguments.diagnose_seconds)
        spent = time.perf_counter() - started
        follow_up.follow_up(journal, implementations, here, seconds, spent=spent, console=console)
    if arguments.shrink and interrupts.get_received_signal() is None:
        from conformance.commands.probes import finding_shrinker  # imported late: nothing else here needs Hypothesis

        with interrupts.end_on_signal():
            for line in finding_shrinker.shrink_findings(journal, implementations, here, console):
                told.append(line)  # one by one: what was found before Ctrl-C is told
    return told


def _described(
    arguments: argparse.Namespace,
    implementations: Sequence[Implementation],
    planned: run_plan.Plan,
    chosen: settings.Settings,
    kernels: KernelOptions,
) -> Run:
    """What holds for all records of the run."""
    level = "one case" if arguments.case is not None else "regressions" if arguments.regressions else arguments.level
    level = "a named problem" if arguments.problem and arguments.case is None else level
    named = arguments.case is not None or arguments.regressions or arguments.problem
    return provenance.build_run(
        implementations,
        planned,
        command=format_command_line(),
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
    found = [one.run for one in argument_lookup.read_recorded_runs(arguments.resume)]
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
    check_writable(arguments.resume, "resume")
    return path


def _with_first(first: Path, others: Sequence[Path]) -> list[Path]:
    """The file that is gone on with, and those that are to have the same."""
    return [first, *(path for path in others if path.resolve() != first.resolve())]


def _implementations(
    arguments: argparse.Namespace, chosen: settings.Settings, kernels: KernelOptions
) -> list[Implementation]:
    names = implementation_registry.list_implementations() if arguments.all else chosen.resolve_groups(arguments.impl)
    return [argument_lookup.find_implementation(name, kernels) for name in names]


def _checks(arguments: argparse.Namespace) -> tuple[Check, ...]:
    for name in arguments.check:
        if name not in CHECKS_BY_NAME:
            if "," in name:
                raise CannotJudge(f"{name!r} is several names: give --check once for each")
            raise CannotJudge(f"unknown check {name!r}: known are {', '.join(CHECKS_BY_NAME)}")
    return tuple(check for check in CHECKS if not arguments.check or check.name in arguments.check)


def _plan(arguments: argparse.Namespace, implementations: Sequence[Implementation], level: str) -> run_plan.Plan:
    checks = _checks(arguments)
    if arguments.problem:
        return run_plan.plan_problem(implementations, argument_lookup.select_problem_cases(arguments), checks)
    if arguments.case is not None:
        case = argument_lookup.parse_case(arguments.case)
        turn = Rotation(pulled=(arguments.pullback,)) if arguments.pullback else FULL_ROTATION
        plans = [run_plan.plan_case(implementation, case, checks, turn) for implementation in implementations]
        return run_plan.Plan(tuple(job for one in plans for job in one.jobs), ())
    if arguments.regressions:
        return run_plan.plan_regressions(implementations, checks)
    return run_plan.plan_run(
        implementations, level=level, seeds=arguments.seed or (0,), query=arguments.cases, checks=checks
    )


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
        judge_in_parallel(jobs, workers, kernels, on_job, here.report_lost, one_by_one=one_by_one)


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
        implementation.name: conformity.compute_conformity(
            [r for r in found if r.implementation == implementation.name]
        )
        for implementation in present or implementations
    }
    is_missing = bool(required) and not any(r.platform == required and r.verdict in records.JUDGED for r in found)
    if is_missing:
        console.print(f"--require-platform={required}: nothing was judged there", style="red")
    if conformity.DOES_NOT_CONFORM in standings.values():
        return 1
    if is_missing or interrupted or conformity.NOT_JUDGED in standings.values():
        return 2
    return 0


def judge_all(names: Sequence[str], level: str, seeds: Sequence[int], workers: int | None) -> list[Record]:
    """The records of whole grids, with progress."""
    found: list[Record] = []
    kernels = KernelOptions()
    planned = run_plan.plan_run(
        [argument_lookup.find_implementation(name, kernels) for name in names], level=level, seeds=seeds
    )
    with RunProgress(len(planned.jobs), Console(stderr=True)) as progress:

        def on_job(job: Job, judged: list[Record]) -> None:
            found.extend(judged)
            progress.advance(judged)

        _run_jobs(planned.jobs, workers, kernels, argument_lookup.load_project_settings(), on_job)
    return found
