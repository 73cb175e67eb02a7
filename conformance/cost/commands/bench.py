"""Implement the command `bench`: compare the time and memory of implementations on this machine.

`run_bench` gets the parsed arguments, times the implementations (`conformance.cost.timing`), prints a table, and writes
the files that the user asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence

import jax
from rich.console import Console

from cases.case import Case
from cases.case_id import matches_query
from cases.operand_values import draw_problem
from conformance import environment, interrupts
from conformance.commands.argument_lookup import check_outputs, format_command_line
from conformance.commands.progress_display import StepProgress
from conformance.cost.timing import attention_flops
from conformance.cost.timing.interleaved_timing import TimingLimits, compare_all
from conformance.executor_tasks import single_calls
from conformance.sandbox.kernel_options import KernelOptions
from conformance.sandbox.kernel_process import ProcessLost
from conformance.sandbox.sandboxed_executor import create_executor, end_process, is_sandboxed
from conformance.session import project_lookup
from conformance.session.failures import CannotJudge, choose_exit_code
from conformance.session.run_outputs import Outputs
from reports import speed_page, terminal
from reports.records import ERROR, RunInfo, write_measurements
from reports.records.measurement import BACKWARD, DIFFERS, FORWARD, TIMED, Measurement

_PHASES = {"forward": (FORWARD,), "backward": (BACKWARD,), "both": (FORWARD, BACKWARD)}


def run_bench(arguments: argparse.Namespace) -> int:
    """Time implementations and print the measurements; return the exit code, as the help of `bench` lists it."""
    started = time.perf_counter()
    limits = parse_limits(arguments)
    chosen = project_lookup.load_project_settings()
    names = chosen.resolve_groups(name for given in arguments.impl for name in given.split(",") if name)
    if not names:
        raise CannotJudge("nothing to time: give --impl=NAME[,NAME...] (see `python -m conformance list`)")
    outputs = check_outputs(arguments)
    cases = _choose_cases(arguments)
    for name in names:
        _reject_process_ending_kernel(name, cases)
    kernels = KernelOptions(arguments.products, in_process=True)
    implementations = project_lookup.find_implementations(names, kernels)
    comparisons = [(case, phase) for case in cases for phase in _PHASES[arguments.phase]]
    console, table = Console(stderr=True), Console()
    warn_of_distorted_timing(console)

    measured: list[Measurement] = []

    def on_compared(found: list[Measurement]) -> None:
        measured.extend(found)
        if outputs.json is not None:  # a killed run keeps what it measured
            _write_json(outputs, measured)
        terminal.print_measurements(found, table)

    with StepProgress(console) as steps:
        compared = compare_all(
            implementations, comparisons, limits, chosen.tolerances, on_step=steps.say, on_compared=on_compared
        )
    if compared.interrupted:
        interrupts.stop_raising()  # a second Ctrl-C must not cut off the files written below
        console.print("Interrupted: only measurements from before the interruption are kept.", style="yellow")
    write_outputs(
        outputs, compared.measurements, "bench", time.perf_counter() - started, interrupted=compared.interrupted
    )
    outcomes = [measurement.outcome for measurement in compared.measurements]
    return choose_exit_code(
        is_wrong=any(outcome in (DIFFERS, ERROR) for outcome in outcomes),
        is_judged=not compared.interrupted and any(outcome in TIMED for outcome in outcomes),
    )


def _reject_process_ending_kernel(name: str, cases: Sequence[Case]) -> None:
    """Refuse a kernel that would end or hang this process, in which it would be timed.

    The kernel is traced once on each case in a sandbox. Raises `CannotJudge` if the sandbox's process ends or hangs.
    """
    implementation = project_lookup.find_implementation(name)
    if not is_sandboxed(implementation) or implementation.accelerator.absent is not None:
        return
    executor = create_executor(implementation)
    try:
        for case in cases:
            if implementation.supports(case) is None:
                with contextlib.suppress(Exception):  # timing the kernel will raise and report the exception again
                    executor.run(single_calls.trace_call, draw_problem(case))
    except ProcessLost as lost:
        raise CannotJudge(f"{name} cannot be timed: {lost}") from lost
    finally:
        end_process(implementation)  # frees the device memory that the sandbox holds


def parse_limits(arguments: argparse.Namespace) -> TimingLimits:
    """Return the limits on timing (`--runs`, `--seconds`). Raises `CannotJudge` if one is not positive."""
    if arguments.runs < 1:
        raise CannotJudge(f"--runs must be at least 1, got {arguments.runs}")
    if not arguments.seconds > 0:
        raise CannotJudge(f"--seconds must be positive, got {arguments.seconds:g}")
    return TimingLimits(rounds=arguments.runs, seconds=arguments.seconds)


def warn_of_distorted_timing(console: Console) -> None:
    """Print a warning if this process runs under flags that make timings meaningless."""
    if (reason := environment.find_timing_distortion()) is not None:
        console.print(f"These timings say little: {reason}.", style="yellow", highlight=False, soft_wrap=True)


def write_outputs(
    outputs: Outputs, found: Sequence[Measurement], level: str, seconds: float, *, interrupted: bool
) -> None:
    """Write measurements as JSON lines and as a page, each if its path is not None. Raises `CannotJudge` if it fails.

    The page shows `level`, the name of the command, in place of a level of the grid.
    """
    reason = environment.find_timing_distortion()
    info = RunInfo(
        command=format_command_line(),
        level=level,
        environment=environment.describe_environment(),
        tolerances=[],
        seconds=round(seconds, 1),
        interrupted=interrupted,
        notes=[f"These timings say little: {reason}."] if reason is not None else [],
    )
    if outputs.json is not None:
        _write_json(outputs, found)
    try:
        if outputs.report is not None:
            speed_page.save_speed_page(outputs.report, found, info)
            write_measurements(outputs.report.with_suffix(".jsonl"), found)
    except OSError as error:
        raise CannotJudge(f"{error.filename} cannot be written: {error.strerror or error}") from error


def _write_json(outputs: Outputs, found: Sequence[Measurement]) -> None:
    """Write measurements to the file of `--json`. Raises `CannotJudge` if that is not possible."""
    assert outputs.json is not None
    try:
        write_measurements(outputs.json, found)
    except OSError as error:
        raise CannotJudge(f"{error.filename} cannot be written: {error.strerror or error}") from error


def _choose_cases(arguments: argparse.Namespace) -> list[Case]:
    if arguments.case and arguments.cases is not None:
        raise CannotJudge("--case names cases by their ids: it cannot be combined with --cases")
    if arguments.case:
        return [project_lookup.parse_case(text) for text in dict.fromkeys(arguments.case)]
    default = attention_flops.list_default_cases(jax.default_backend())
    found = [case for case in default if arguments.cases is None or matches_query(arguments.cases, case.id)]
    if not found:
        known = ", ".join(case.id for case in default)
        raise CannotJudge(f"no default case matches --cases={arguments.cases!r}: they are {known}")
    return found
