"""`explore`: look for a wrong case beyond the grid."""

from __future__ import annotations

import argparse
import dataclasses

from rich.console import Console

from conformance import interrupts
from conformance.commands import annotate, lookup
from conformance.commands.errors import CannotJudge
from conformance.commands.outputs import command_line, outputs_of, step_summary
from conformance.commands.progress import Exploring
from conformance.judging import flag_share, provenance
from conformance.judging.evidence import EXPLORE, gather
from conformance.judging.journal import CannotWrite, Journal
from conformance.judging.plan import Plan
from conformance.records import RED
from conformance.runs import COMPLETE, FAILED, INTERRUPTED
from reports import terminal


def explore(arguments: argparse.Namespace) -> int:
    """`explore`: look for a wrong case beyond the grid."""
    from conformance.judging import explore as exploring  # imported late: only this and `--shrink` need Hypothesis

    if arguments.seed is not None:
        lookup.reject_bad_seed(arguments.seed)
    try:
        budget = exploring.budget(
            arguments.profile, seconds=arguments.seconds, examples=arguments.examples, seed=arguments.seed
        )
    except ValueError as error:
        raise CannotJudge(f"--{error}") from error
    outputs = dataclasses.replace(outputs_of(arguments), step=step_summary())
    chosen = lookup.load_settings()
    kernels = lookup.kernels(arguments)
    implementation = lookup.find(arguments.impl, kernels)
    if implementation.accelerator.absent is not None:
        raise CannotJudge(f"{implementation.name} cannot run here: {implementation.accelerator.absent}")
    described = provenance.recorded_run(
        [implementation],
        Plan((), ()),
        command=command_line(),
        level=EXPLORE,
        narrowed="explored cases",
        seeds=(budget.seed,),
        limits=chosen.tolerances.rows(),
        kernels=kernels,
    )
    interrupts.finish()  # from here on a signal ends in a summary and a page
    console = Console(stderr=True)
    console.print(f"seed {budget.seed}", highlight=False)
    try:
        journal = Journal(outputs.journals, described)
    except CannotWrite as error:
        raise CannotJudge(str(error)) from error
    try:
        with interrupts.stoppable(), Exploring(budget.seconds, console) as progress:

            def on_case(seen: exploring.Seen) -> None:
                if not (seen.shrinking or any(record.verdict in RED for record in seen.records)):
                    journal.add(seen.records)  # of wrong cases, only the smallest stays
                progress.advance(seen.records, shrinking=seen.shrinking)

            try:
                found = exploring.explore(
                    implementation, chosen, budget, query=arguments.cases, on_case=on_case, options=kernels.options
                )
            except exploring.NothingToDraw as error:
                raise _ended(journal, f"there is no case to draw: {error}") from error
            except exploring.WrongClues as error:
                raise _ended(journal, f"{error} (`run` judges it without asking that)") from error
        written = {record.key for record in journal.recorded.records}
        journal.add([record for record in found.records if record.key not in written])
        excess = flag_share.find_excess(journal.recorded.records)
        journal.add(excess)
        reason = interrupts.reason() if found.interrupted else ""
        journal.end(INTERRUPTED if found.interrupted else COMPLETE, reason=reason, seconds=found.seconds)
    except CannotWrite as error:
        raise CannotJudge(f"{error}; what was judged before is in it") from error
    judged, info = gather([journal.recorded], command=described.command)
    info = dataclasses.replace(info, notes=exploring.told(found, budget.seed))
    outputs.write(judged, info)
    terminal.print_summary(judged, info, Console())
    for note in info.notes:
        Console().print(note, highlight=False, soft_wrap=True)
    print("".join(f"{line}\n" for line in annotate.annotated(judged)), end="")
    if found.failing is not None or excess:
        return 1
    return 0 if found.judged and not found.interrupted else 2


def _ended(journal: Journal, reason: str) -> CannotJudge:
    """End the files of a run that cannot go on, and return what says so."""
    journal.end(FAILED, reason=reason)
    return CannotJudge(reason)
