"""Implement `explore`: draw cases beyond the grid until the implementation is wrong on one, and shrink that case."""

from __future__ import annotations

import argparse
import dataclasses

from rich.console import Console

from conformance import interrupts
from conformance.commands import argument_lookup
from conformance.commands.argument_lookup import check_outputs, format_command_line
from conformance.commands.progress_display import ExplorationProgress
from conformance.judging import flag_share, provenance
from conformance.judging.journal import Journal, JournalWriteError
from conformance.judging.remote_call import WorkerMismatch
from conformance.judging.run_aggregation import EXPLORATION_LEVEL, aggregate_runs
from conformance.judging.run_plan import Plan
from conformance.judging.task_pools import ExecutorFailed
from conformance.session import project_lookup, run_annotations, run_spec
from conformance.session.failures import CannotJudge, choose_exit_code
from conformance.session.remote_pools import open_cluster
from conformance.session.run_outputs import find_step_summary
from reports import terminal
from reports.conformity import WRONG
from reports.page_model import build_summary
from reports.records import COMPLETE, FAILED, INTERRUPTED, RED


def explore(arguments: argparse.Namespace) -> int:
    """Judge drawn cases until the implementation is wrong on one or the time is up; shrink a wrong case."""
    from conformance.judging import explorer as exploring  # imported late, since it loads Hypothesis

    if arguments.seed is not None:
        run_spec.reject_bad_seed(arguments.seed)
    try:
        budget = exploring.build_budget(
            arguments.profile, seconds=arguments.seconds, examples=arguments.examples, seed=arguments.seed
        )
    except ValueError as error:
        raise CannotJudge(f"--{error}") from error
    outputs = dataclasses.replace(check_outputs(arguments), step=find_step_summary())
    chosen = project_lookup.load_project_settings()
    kernels = argument_lookup.build_kernel_options(arguments)
    implementation = project_lookup.find_implementation(arguments.impl, kernels)
    if implementation.accelerator.absent is not None:
        raise CannotJudge(f"{implementation.name} cannot run here: {implementation.accelerator.absent}")
    described = provenance.build_run(
        [implementation],
        Plan((), ()),
        command=format_command_line(),
        level=EXPLORATION_LEVEL,
        narrowed="explored cases",
        seeds=(budget.seed,),
        limits=chosen.tolerances.rows(),
        kernels=kernels,
    )
    remote = open_cluster(arguments.cluster, (implementation.name,)) if arguments.cluster is not None else None
    interrupts.stop_raising()  # from here on, a signal ends the search, and the results so far are written
    console = Console(stderr=True)
    console.print(f"seed {budget.seed}", highlight=False)
    try:
        journal = Journal(outputs.journals, described)
    except JournalWriteError as error:
        raise CannotJudge(str(error)) from error
    try:
        with interrupts.raise_on_signal(), ExplorationProgress(budget.seconds, console) as progress:

            def on_case(seen: exploring.JudgedCase) -> None:
                if not (seen.shrinking or any(record.verdict in RED for record in seen.records)):
                    journal.add_records(seen.records)  # of the wrong cases, only the smallest is recorded, below
                progress.advance(seen.records, shrinking=seen.shrinking)

            try:
                found = exploring.explore(
                    implementation,
                    chosen,
                    budget,
                    query=arguments.cases,
                    on_case=on_case,
                    options=kernels.options,
                    pool=remote.pool if remote is not None else None,
                    kernels=kernels,
                )
            except exploring.NothingToDraw as error:
                raise _end_journal(journal, f"there is no case to draw: {error}") from error
            except exploring.InvalidCodeNumbers as error:
                raise _end_journal(journal, f"{error} (`run` judges the kernel without these numbers)") from error
            except (ExecutorFailed, WorkerMismatch) as error:
                raise _end_journal(journal, str(error)) from error
            finally:
                if remote is not None:
                    remote.close()
        written = {record.key for record in journal.recorded.records}
        journal.add_records([record for record in found.records if record.key not in written])
        excess = flag_share.find_excess(journal.recorded.records)
        journal.add_records(excess)
        reason = interrupts.describe_signal() if found.interrupted else ""
        journal.end(INTERRUPTED if found.interrupted else COMPLETE, reason=reason)
    except JournalWriteError as error:
        raise CannotJudge(f"{error}; what was judged before is in it") from error
    judged, info = aggregate_runs([journal.recorded], command=described.command)
    info = dataclasses.replace(info, notes=exploring.describe_exploration(found, budget.seed))
    summary = build_summary(judged, info)
    outputs.write(summary)
    terminal.print_summary(summary, Console())
    for note in info.notes:
        Console().print(note, highlight=False, markup=False, soft_wrap=True)
    print("".join(f"{line}\n" for line in run_annotations.annotate_run(judged)), end="")
    is_judged = bool(found.judged) and not found.interrupted
    is_wrong = found.failing is not None or bool(excess) or any(x.conformity in WRONG for x in summary.implementations)
    return choose_exit_code(is_wrong=is_wrong, is_judged=is_judged)


def _end_journal(journal: Journal, reason: str) -> CannotJudge:
    """Write the end of a run that cannot continue, and return the exception with the reason."""
    journal.end(FAILED, reason=reason)
    return CannotJudge(reason)
