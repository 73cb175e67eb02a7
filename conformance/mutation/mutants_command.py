"""Implement `mutants`: measure which wrong functions a test suite catches, and print what it lets through."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

from rich.console import Console
from rich.table import Table

from conformance import environment
from conformance.session.failures import CannotJudge
from conformance.session.run_outputs import check_writable
from conformance.session.run_spec import reject_bad_job_count, reject_negative_seconds
from reports.mutant_results import CAUGHT, NOT_RUN, PASSED, UNSEEN, MutantOutcome, MutantResults
from reports.output_files import RECORDS


def run_mutants(arguments: argparse.Namespace) -> int:
    """Measure the suite; return 0, or 1 if it catches less than `--fail-under`."""
    given = dict(os.environ)
    environment.prepare_environment()  # for this process: the suite gets what was given
    from conformance.mutation import measuring, mutant_list

    console = Console(markup=False, highlight=False, soft_wrap=True)
    if arguments.list:
        for bug in mutant_list.MUTANTS:
            console.print(f"{bug.family:<16} {bug.name}: {bug.says} ({bug.reference})")
        return 0
    command = arguments.suite[1:] if arguments.suite[:1] == ["--"] else arguments.suite
    if not arguments.replace or not command:
        raise CannotJudge("name the function and the tests: mutants --replace=module:function -- pytest tests")
    if ":" not in arguments.replace or arguments.replace.partition(":")[0].endswith(".py"):
        raise CannotJudge(f"--replace={arguments.replace}: write module:function, as the tests import it")
    _reject_bad_numbers(arguments)
    save = None if arguments.save is None else check_writable(arguments.save, "save", RECORDS)
    page = None if arguments.report is None else check_writable(arguments.report, "report")
    tests = None if arguments.write_tests is None else Path(arguments.write_tests)
    if tests is not None and (tests.exists() or not tests.parent.is_dir()):
        reason = "exists already: delete it" if tests.exists() else f"cannot be written: there is no {tests.parent}"
        raise CannotJudge(f"--write-tests={tests} {reason}, or name another file")
    options = measuring.Options(
        command=command,
        function=arguments.replace,
        through=arguments.through or "",
        families=arguments.family,
        every=arguments.every,
        sample=arguments.sample,
        seconds=arguments.seconds,
        inputs_seconds=arguments.inputs_seconds,
        jobs=arguments.jobs,
        save=save,
        environment=given,
    )
    results = measuring.measure(options, say=console.print)
    print_results(results, console)
    if page is not None:
        from reports.mutants_page import save_mutants_page

        save_mutants_page(page, results)
        console.print(f"Wrote {page}.")
    if tests is not None:
        _write_tests(results, tests, console)
    return judge_share(results, arguments.fail_under, console)


def _reject_bad_numbers(arguments: argparse.Namespace) -> None:
    reject_bad_job_count(arguments.jobs)
    reject_negative_seconds("--seconds", arguments.seconds)
    reject_negative_seconds("--inputs-seconds", arguments.inputs_seconds)
    if arguments.sample is not None and arguments.sample < 1:
        raise CannotJudge(f"--sample must be at least 1, got {arguments.sample}")
    if arguments.fail_under is not None and not math.isfinite(arguments.fail_under):
        raise CannotJudge(f"--fail-under must be a finite number, got {arguments.fail_under}")


def judge_share(results: MutantResults, fail_under: float | None, console: Console) -> int:
    """Return 1 if the suite catches less than it must, in percent; 2 if nothing was measured."""
    if results.share is None:
        return 2
    if fail_under is not None and 100 * results.share < fail_under:
        console.print(f"It catches less than --fail-under={fail_under:g}.", style="bold red")
        return 1
    return 0


def print_results(results: MutantResults, console: Console) -> None:
    """Print what passed, what cannot be seen, and a table by family."""
    passed = results.select(PASSED)
    if passed:
        console.print("\nThe suite passes with these wrong functions:", style="bold")
        for one in passed:
            console.print(f"  {one.family}: {one.sentence} ({one.reference})")
            console.print(f"    a call that sees it has {one.call}")
            if one.case:
                console.print(f"    the smallest case that catches it: {one.case}")
    if unseen := results.select(UNSEEN):
        console.print("\nThese give the right results on every call of the suite:", style="bold")
        by_lack: dict[str, list[MutantOutcome]] = {}
        for one in unseen:
            by_lack.setdefault(one.detail, []).append(one)
        for lack, ones in sorted(by_lack.items(), key=lambda item: -len(item[1])):
            names = ", ".join(one.name for one in ones[:3]) + (f" and {len(ones) - 3} more" if len(ones) > 3 else "")
            console.print(f"  {lack}: {names}")
            if ones[0].case:
                console.print(f"    such as {ones[0].case}")
    for one in results.select(NOT_RUN)[:1]:
        console.print(f"\n{len(results.select(NOT_RUN))} were not tried: {one.detail}", style="yellow")
    table = Table(box=None, pad_edge=False)
    for heading in ("family", "caught", "passed", "cannot be seen"):
        table.add_column(heading, justify="left" if heading == "family" else "right")
    for name, *counts in results.families:
        table.add_row(name, *(str(count) if count else "" for count in counts))
    console.print()
    console.print(table)
    if results.share is None:
        console.print("\nNo wrong function was tried.", style="bold yellow")
        return
    caught = len(results.select(CAUGHT))
    text = f"The suite catches {caught} of {caught + len(passed)} wrong functions that its inputs can see"
    console.print(f"\n{text} ({results.share:.0%}).", style="bold")


def _write_tests(results: MutantResults, path: Path, console: Console) -> None:
    """Write tests with the cases that catch what passed, and the adapter that they import."""
    from conformance.commands.adapt import write_adapter_for
    from conformance.mutation.smallest_cases import write_tests

    cases: dict[str, str] = {}
    for one in results.select(PASSED):
        if one.case:
            cases[one.case] = ", ".join(filter(None, (cases.get(one.case, ""), one.name)))
    if not cases:
        console.print("No case is to be written.")
        return
    adapter = write_adapter_for(results.function)
    path.write_text(write_tests(results.function, adapter.replace(".py:", ":"), cases), encoding="utf-8")
    console.print(f"Wrote {path}: {len(cases)} cases.", style="bold")
