"""Implement `run`: judge implementations, print and write the results, and return whether all conform as exit code."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import msgspec
from rich.console import Console

from conformance.commands.adapt import write_adapter_for
from conformance.commands.argument_lookup import format_command_line
from conformance.commands.progress_display import RunProgress
from conformance.session.failures import CannotJudge
from conformance.session.input_files import read_recorded_runs
from conformance.session.job_judging import FIRST_FAILURE
from conformance.session.planned_run import PlannedRun, describe_plan, describe_unasked
from conformance.session.run_annotations import annotate_run
from conformance.session.run_result import SessionResult, compare_with_baseline
from conformance.session.run_spec import RunSpec, build_spec, draw_seeds, read_query, says_what_to_judge
from conformance.session.session import plan_session, run_planned
from reports import changes_page, terminal
from reports.records import FAILED


def run(arguments: argparse.Namespace) -> int:
    """Judge and report; return 0 if all implementations conform, 1 if not, 2 if they could not be judged."""
    options, notes = build_options(arguments)
    planned = plan_session(options)
    console = Console(stderr=True, markup=False)  # names may look like rich's markup

    def say(line: str) -> None:
        console.print(line, style="dim", highlight=False, soft_wrap=True)

    for line in (describe_plan(planned), *describe_unasked(planned.resolved.implementations)):
        say(line)
    result = run_planned(planned, lambda total, finished: RunProgress(total, console, finished), say)
    if result.reason == FIRST_FAILURE:
        console.print(result.reason, style="yellow", soft_wrap=True)
    if result.how == FAILED:
        raise CannotJudge(result.reason)
    _print_result(planned, result, notes, console)
    result = compare_with_baseline(planned.resolved, result)
    if result.comparison is not None:
        changes_page.print_comparison(result.comparison, Console())
    lines = annotate_run(result.records, result.comparison, result.info)
    print("".join(f"{line}\n" for line in lines), end="")
    return result.exit_code


def _print_result(planned: PlannedRun, result: SessionResult, notes: list[str], console: Console) -> None:
    options = planned.resolved.spec
    terminal.print_summary(result.summary, Console(), options.report or "")
    for line in result.shrunk:
        Console().print(line, highlight=False, markup=False, soft_wrap=True)
    places = [f"{name} {kernel.place}" for name, kernel in planned.run.kernels.items() if kernel.place]
    for note in [*notes, *planned.notes, *places]:
        console.print(note, style="yellow", highlight=False, soft_wrap=True)
    if result.lacks_platform:
        console.print(f"--require-platform={options.require_platform}: nothing was judged there", style="red")


def build_options(arguments: argparse.Namespace) -> tuple[RunSpec, list[str]]:
    """Build the options of the run, and notes for the user, such as on randomly drawn seeds.

    With `--resume`, the file of the earlier run says what to judge, unless the arguments say that themselves.

    Raises:
      CannotJudge: if the options are invalid.
    """
    given = vars(arguments)
    if arguments.adapt:
        given = given | {"impl": [write_adapter_for(name) for name in arguments.impl]}
    if arguments.resume is not None:
        given = given | _read_resumed_options(arguments.resume, given)
    seeds, notes = draw_seeds(given["seed"])
    return build_spec(given | {"seed": seeds}, command=format_command_line()), notes


def _read_resumed_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in the file to continue that say what to judge; empty if the given ones already say that."""
    found = [one.run for one in read_recorded_runs(name)]
    if len(found) != 1 or found[0] is None:
        what = f"{len(found)} runs" if len(found) > 1 else "no run record"
        raise CannotJudge(f"--resume={name} has {what}: it takes the file of one run")
    resumed = {} if says_what_to_judge(given) else read_query(msgspec.to_builtins(found[0].query), found[0].shard)
    both = {**given, **resumed}
    if not (both["impl"] or both["all"]):
        raise CannotJudge(f"--resume={name} is no run of this command: give the options of the command that wrote it")
    return resumed
