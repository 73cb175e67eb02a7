"""`explore`: look for a wrong case beyond the grid."""

from __future__ import annotations

import argparse
import signal

from rich.console import Console

from conformance import environment
from conformance.commands import lookup
from conformance.commands.errors import CannotJudge
from conformance.commands.outputs import command_line, outputs_of
from conformance.commands.progress import Exploring
from conformance.records import RunInfo
from reports import terminal


def explore(arguments: argparse.Namespace) -> int:
    """`explore`: look for a wrong case beyond the grid."""
    from conformance.judging import explore as exploring  # imported late: no other command needs Hypothesis

    if arguments.seed is not None:
        lookup.reject_negative(arguments.seed)
    try:
        budget = exploring.budget(
            arguments.profile, seconds=arguments.seconds, examples=arguments.examples, seed=arguments.seed
        )
    except ValueError as error:
        raise CannotJudge(f"--{error}") from error
    outputs = outputs_of(arguments)
    chosen = lookup.load_settings()
    implementation = lookup.find(arguments.impl, arguments.products)
    if implementation.accelerator.absent is not None:
        raise CannotJudge(f"{implementation.name} cannot run here: {implementation.accelerator.absent}")
    console = Console(stderr=True)
    console.print(f"seed {budget.seed}", highlight=False)
    with Exploring(budget.seconds, console) as progress:

        def on_case(seen: exploring.Seen) -> None:
            progress.advance(seen.records, shrinking=seen.shrinking)

        try:
            found = exploring.explore(implementation, chosen, budget, query=arguments.cases, on_case=on_case)
        except exploring.NothingToDraw as error:
            raise CannotJudge(f"there is no case to draw: {error}") from error
    if found.interrupted:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what was found gets written, whatever else is pressed
    info = RunInfo(
        command=command_line(),
        level="explore",
        environment=environment.describe(),
        tolerances=chosen.tolerances.rows(),
        seconds=round(found.seconds, 1),
        interrupted=found.interrupted,
        notes=exploring.told(found, budget.seed),
        narrowed=f"{found.judged:,} explored cases",
    )
    outputs.write(found.records, info)
    terminal.print_summary(found.records, info, Console())
    for note in info.notes:
        Console().print(note, highlight=False, soft_wrap=True)
    if found.failing is not None:
        return 1
    return 0 if found.judged and not found.interrupted else 2
