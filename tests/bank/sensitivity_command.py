"""Measure which planted bugs of a bank the gate detects, and the smallest error it detects, for `tests.bank`."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from cases.name_suggestions import suggest_name
from conformance import environment, interrupts
from conformance.commands.argument_lookup import check_outputs, format_command_line
from conformance.commands.progress_display import RunProgress
from conformance.judging.remote_call import WorkerMismatch
from conformance.judging.task_pools import ExecutorFailed
from conformance.mutation.planted_bug import PlantedBug
from conformance.sensitivity import detection_table
from conformance.session import project_lookup, run_spec
from conformance.session.failures import CannotJudge
from reports import text_format
from reports.page_model import build_summary
from reports.records import RunInfo
from tests.bank import error_profiles_command, resolution
from tests.bank.detection_results import build_table, merge_tables, parse_examinations, save_table
from tests.bank.examination import CheckPower, Examination, compute_check_powers, is_still_asked
from tests.bank.parallel_examination import BugKilledProcess, examine_parallel, open_bank_pool
from tests.bank.planted_bug import BankError, load_bank


def measure_sensitivity(arguments: argparse.Namespace) -> int:
    """Judge every planted bug; return 0 if all are detected and every check is needed, 1 if not, 2 if stopped."""
    started = time.perf_counter()
    level = arguments.level or "quick"
    run_spec.reject_bad_job_count(arguments.jobs)
    outputs = check_outputs(arguments)
    chosen = project_lookup.load_project_settings()
    bank = arguments.bank
    last = detection_table.load_table()
    bugs = _load_bugs(bank)
    if arguments.profiles:
        return error_profiles_command.measure_profiles(bank, bugs, arguments)
    asked = _select_bugs(bugs, arguments, level, last)
    unmeasured = {name: reason for name in asked if (reason := bugs[name].unmeasurable()) is not None}
    names = [name for name in asked if name not in unmeasured]
    if arguments.save and level == "smoke":
        raise CannotJudge("--save is for results of a whole grid, which reports show: give it without --level=smoke")
    whole = not (arguments.bug or arguments.new)
    weighed = whole and level != "smoke"  # `smoke` runs too little to tell which checks are needed
    described = environment.describe_environment()
    if arguments.save and not whole:
        _reject_other_conditions(last, level, described)
    examined: list[Examination] = []
    resolutions: list[resolution.Resolution] = []
    interrupted = False
    console = Console(stderr=True)
    with RunProgress(len(names), console) as progress:

        def on_bug(found: Examination) -> None:
            examined.append(found)
            progress.advance([])

        try:
            with open_bank_pool(arguments) as pool:
                examine_parallel(bank, names, level, pool, on_bug)
            if weighed:
                resolutions = list(resolution.measure_resolutions(chosen.tolerances))
            interrupts.raise_if_stopped()
        except (BugKilledProcess, ExecutorFailed, WorkerMismatch) as error:
            raise CannotJudge(str(error)) from error
        except KeyboardInterrupt:
            interrupted = True
    interrupts.stop_raising()  # writing the results must not be interrupted
    complete = bool(names) and len(examined) == len(names)
    stands = last if last is not None and last["level"] == level else None  # results of another level do not apply
    kept = parse_examinations(stands, set(bugs) - set(names) if arguments.save else unmeasured)
    examined += kept
    table = build_table(examined, resolutions, level=level, environment=described)
    if arguments.save and not whole:
        table = merge_tables(table, last)
    if arguments.save and not interrupted:
        save_table(table)
    info = RunInfo(
        command=format_command_line(),
        level=level,
        environment=described,
        tolerances=chosen.tolerances.rows(),
        seconds=round(time.perf_counter() - started, 1),
        interrupted=interrupted,
        detection=table,
    )
    outputs.write(build_summary([], info))
    _print_results(examined, resolutions, whole=weighed and not interrupted)
    _print_unmeasured(unmeasured, {e.bug for e in kept})
    seen = not any(e.survives for e in examined)
    needed = not (weighed or arguments.save) or all(power.alone for power in compute_check_powers(examined))
    return (0 if seen and needed else 1) if complete else 2


def _load_bugs(bank: str) -> dict[str, PlantedBug]:
    """Load the bugs of a bank by name. Raises `CannotJudge` if there is no such bank."""
    try:
        return {bug.name: bug for bug in load_bank(bank)}
    except BankError as error:
        raise CannotJudge(str(error)) from error


def _select_bugs(
    bugs: Mapping[str, PlantedBug], arguments: argparse.Namespace, level: str, last: Mapping[str, Any] | None
) -> list[str]:
    """Select the bugs to examine: the named ones, with `--new` those without a saved, valid measurement, or all."""
    for name in arguments.bug:
        if name not in bugs:
            raise CannotJudge(f"the bank has no bug {name!r}{suggest_name(name, bugs)}")
    if not arguments.new:
        return list(arguments.bug) or list(bugs)
    if arguments.bug:
        raise CannotJudge("--new chooses the bugs: it cannot be combined with --bug")
    known = {examined.bug: examined.detections for examined in parse_examinations(last, bugs)}
    if found := [name for name in bugs if not (name in known and is_still_asked(bugs[name], level, known[name]))]:
        return found
    raise CannotJudge("every bug of the bank has a saved measurement that is still valid: nothing is new")


def _reject_other_conditions(last: Mapping[str, Any] | None, level: str, described: Mapping[str, str]) -> None:
    """Raise `CannotJudge` if the saved measurements of the other bugs are of another level or version of JAX."""
    if last is None:
        raise CannotJudge("--save of a part of the bank needs saved results of the rest: measure the whole bank first")
    kept = {"level": last["level"], "jax": last["environment"]["jax"]}
    here = {"level": level, "jax": described["jax"]}
    if kept != here:
        raise CannotJudge(f"--save of a part: the saved results are of {kept}, these of {here}; measure the whole bank")


def _print_results(
    examined: Sequence[Examination], resolutions: Sequence[resolution.Resolution], *, whole: bool
) -> None:
    console = Console(soft_wrap=True)
    ranked = compute_check_powers(examined)
    _print_matrix(console, examined, ranked)
    if whole:
        _print_powers(console, ranked)
        _print_resolution(console, resolutions)
    if times := [e.first_red for e in examined if e.first_red is not None]:
        text = f"first red after {text_format.format_time(statistics.median(times))} of judging (median of bugs seen)"
        console.print(text, highlight=False)
    survivors = [e.bug for e in examined if e.survives]
    console.print(f"{len(examined) - len(survivors)} of {len(examined)} planted bugs are seen", highlight=False)
    for name in survivors:
        console.print(f"survives: {name}", style="red", highlight=False)
    for power in ranked if whole else ():
        if not power.alone:
            console.print(f"no bug needs the check {power.check}", style="red", highlight=False)


def _print_unmeasured(unmeasured: Mapping[str, str], kept: Collection[str]) -> None:
    """Print the bugs that this machine cannot measure, and whether an earlier measurement of them remains valid."""
    console = Console(soft_wrap=True)
    for name, reason in unmeasured.items():
        figures = "the last measurement remains" if name in kept else "never measured at this level"
        console.print(f"not measured here: {name} ({figures}): {reason}", style="yellow", highlight=False)


def _print_matrix(console: Console, examined: Sequence[Examination], ranked: Sequence[CheckPower]) -> None:
    """Print one line for each bug, with a letter for each check that detects it; a capital if only one check does."""
    letters = {power.check: chr(ord("a") + n) for n, power in enumerate(ranked)}
    console.print("  ".join(f"{letter} {check}" for check, letter in letters.items()), highlight=False)
    for e in sorted(examined, key=lambda e: (e.family, e.bug)):
        row = "".join(letter if check in e.detections else "·" for check, letter in letters.items())
        alone = len(e.detections) == 1
        console.print(f"{row.upper() if alone else row}  {e.family}: {e.bug}", highlight=False)


def _print_powers(console: Console, ranked: Sequence[CheckPower]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("check")
    for name in ("seen", "alone", "seconds", "seen/s"):
        table.add_column(name, justify="right")
    for power in ranked:
        rate = f"{power.detected / power.seconds:.2f}" if power.seconds else ""
        table.add_row(power.check, str(power.detected), str(len(power.alone)), f"{power.seconds:.0f}", rate)
    console.print(table)


def _print_resolution(console: Console, resolutions: Sequence[resolution.Resolution]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("smallest error seen", "in", "dtype"):
        table.add_column(name)
    for name in ("relative", "unit roundoffs"):
        table.add_column(name, justify="right")
    for row in resolutions:
        seen = row.smallest is not None and row.roundoffs is not None
        figures = (f"{row.smallest:.2g}", f"{row.roundoffs:.3g}") if seen else ("not seen", "")
        table.add_row(row.perturbation, row.observable, row.dtype, *figures)
    console.print(table)
