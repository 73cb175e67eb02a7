"""`bench`: implementations side by side, by time and memory."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence

import jax
from rich.console import Console

from cases.case import Case, matches
from cases.inputs import draw
from conformance import environment, interrupts
from conformance.bench import measurements, work
from conformance.bench.measurements import BACKWARD, DIFFERS, FORWARD, TIMED, Measurement
from conformance.bench.side_by_side import Limits, compare_all
from conformance.commands import lookup
from conformance.commands.errors import CannotJudge
from conformance.commands.outputs import Outputs, command_line, outputs_of
from conformance.commands.progress import Steps
from conformance.driving import alone
from conformance.records import ERROR, RunInfo
from conformance.sandbox.kernel_options import KernelOptions
from conformance.sandbox.kernel_process import ProcessLost
from conformance.sandbox.sandboxed_executor import create_executor, end_process, is_sandboxed
from reports import side_by_side, terminal

_PHASES = {"forward": (FORWARD,), "backward": (BACKWARD,), "both": (FORWARD, BACKWARD)}


def bench(arguments: argparse.Namespace) -> int:
    """`bench`: time, show, and say by the exit code whether all that was timed computes attention."""
    started = time.perf_counter()
    limits = limits_of(arguments)
    chosen = lookup.load_settings()
    names = chosen.members(name for given in arguments.impl for name in given.split(",") if name)
    if not names:
        raise CannotJudge("nothing to time: give --impl=NAME[,NAME...] (see `python -m conformance list`)")
    outputs = outputs_of(arguments)
    cases = _cases(arguments)
    for name in names:
        _reject_what_ends_its_process(name, KernelOptions(arguments.products), cases)
    implementations = [lookup.find(name, KernelOptions(arguments.products, in_process=True)) for name in names]
    comparisons = [(case, phase) for case in cases for phase in _PHASES[arguments.phase]]
    console, table = Console(stderr=True), Console()
    warn_of_flags(console)

    def on_compared(found: list[Measurement]) -> None:
        terminal.print_measurements(found, table)

    with Steps(console) as steps:
        compared = compare_all(
            implementations, comparisons, limits, chosen.tolerances, on_step=steps.say, on_compared=on_compared
        )
    if compared.interrupted:
        interrupts.finish()  # what was timed gets written whole
        console.print("Interrupted: only what was timed before the stop is kept.", style="yellow")
    write(outputs, compared.measurements, "bench", time.perf_counter() - started, interrupted=compared.interrupted)
    return _exit_code(compared.measurements, interrupted=compared.interrupted)


def _reject_what_ends_its_process(name: str, kernels: KernelOptions, cases: Sequence[Case]) -> None:
    """Refuse a kernel that exits, crashes or hangs: it has a process of its own until it has been traced once."""
    implementation = lookup.find(name, kernels)
    if not is_sandboxed(implementation) or implementation.accelerator.absent is not None:
        return
    executor = create_executor(implementation)
    try:
        for case in cases:
            if implementation.supports(case) is None:
                with contextlib.suppress(Exception):  # what it raises stands in its row
                    executor.run(alone.trace, draw(case))
    except ProcessLost as lost:
        raise CannotJudge(f"{name} cannot be timed: {lost}") from lost
    finally:
        end_process(implementation)  # what it holds of a device is needed


def limits_of(arguments: argparse.Namespace) -> Limits:
    """The limits that a command line sets."""
    if arguments.runs < 1:
        raise CannotJudge(f"--runs must be at least 1, got {arguments.runs}")
    if not arguments.seconds > 0:
        raise CannotJudge(f"--seconds must be positive, got {arguments.seconds:g}")
    return Limits(rounds=arguments.runs, seconds=arguments.seconds)


def warn_of_flags(console: Console) -> None:
    """Say aloud what makes timings of this process worthless."""
    if (reason := environment.falsifies_timing()) is not None:
        console.print(f"These timings say little: {reason}.", style="yellow", highlight=False, soft_wrap=True)


def write(outputs: Outputs, found: Sequence[Measurement], level: str, seconds: float, *, interrupted: bool) -> None:
    """Write measurements and page, whichever are asked for."""
    reason = environment.falsifies_timing()
    info = RunInfo(
        command=command_line(),
        level=level,
        environment=environment.describe(),
        tolerances=[],
        seconds=round(seconds, 1),
        interrupted=interrupted,
        notes=[f"These timings say little: {reason}."] if reason is not None else [],
    )
    try:
        if outputs.json is not None:
            measurements.write_jsonl(outputs.json, found)
        if outputs.report is not None:
            side_by_side.write(outputs.report, found, info)
            measurements.write_jsonl(outputs.report.with_suffix(".jsonl"), found)
    except OSError as error:
        raise CannotJudge(f"{error.filename} cannot be written: {error.strerror or error}") from error


def _cases(arguments: argparse.Namespace) -> list[Case]:
    if arguments.case and arguments.cases is not None:
        raise CannotJudge("--case names cases by their ids: it cannot be combined with --cases")
    if arguments.case:
        return [lookup.case(text) for text in dict.fromkeys(arguments.case)]
    default = work.default_cases(jax.default_backend())
    found = [case for case in default if arguments.cases is None or matches(arguments.cases, case.id)]
    if not found:
        known = ", ".join(case.id for case in default)
        raise CannotJudge(f"no default case matches --cases={arguments.cases!r}: they are {known}")
    return found


def _exit_code(found: Sequence[Measurement], *, interrupted: bool) -> int:
    if any(measurement.outcome in (DIFFERS, ERROR) for measurement in found):
        return 1
    return 2 if interrupted or not any(measurement.outcome in TIMED for measurement in found) else 0
