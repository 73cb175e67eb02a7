"""Implement the command `tune`: choose an implementation's settings by timing them on this machine.

A setting is block sizes and the like; a *knob* is one setting that can be tuned (`impls.contract.tunable`). The chosen
settings are written to the implementation's table, a JSON file. `tune --static` is in `static_tune`.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
from rich.console import Console

from cases.case import Case
from conformance import interrupts
from conformance.commands.argument_lookup import check_outputs
from conformance.commands.progress_display import StepProgress
from conformance.cost.commands import bench, static_tune
from conformance.cost.static import static_tuning
from conformance.cost.timing import timed_tuning
from conformance.cost.timing.interleaved_timing import explain_not_timed
from conformance.cost.timing.timed_tuning import KnobChoice, TuningResult, format_setting
from conformance.sandbox.kernel_options import KernelOptions
from conformance.session import project_lookup
from conformance.session.failures import CannotJudge
from conformance.session.run_outputs import check_writable
from impls.contract import tunable
from impls.contract.implementation import Implementation
from impls.contract.tunable import Knob, TableEntry, Tunable
from reports import terminal
from reports.records.measurement import Measurement


def run_tune(arguments: argparse.Namespace) -> int:
    """Time the candidates of each knob, print them, and write the table of settings; return the exit code."""
    started = time.perf_counter()
    limits = bench.parse_limits(arguments)
    implementation = project_lookup.find_implementation(
        arguments.impl, KernelOptions(in_process=True)
    )  # candidates are timed alternately, which requires that they run in one process
    declared = _get_tunable(implementation)
    path = declared.table if arguments.out is None else check_writable(arguments.out, "out")
    if path is None:
        raise CannotJudge(f"{implementation.name} reads no table: name the file to write with --out")
    outputs = check_outputs(arguments)
    tolerances = project_lookup.load_project_settings().tolerances
    knobs = _choose_knobs(implementation, declared, arguments.knob)
    cases = _choose_cases(implementation, declared, knobs, arguments.case, static=arguments.static)
    if arguments.static:
        return static_tune.choose_settings(
            implementation, declared, cases, static_tune.choose_targets(arguments.target), knobs, path
        )
    console, shown = Console(stderr=True), Console()
    bench.warn_of_distorted_timing(console)
    measured: list[Measurement] = []
    written, interrupted = 0, False
    static: dict[str, dict[str, float]] = {}  # recorded static cycles for the current case, by knob and candidate

    def on_choice(choice: KnobChoice) -> None:
        measured.extend(choice.measurements)
        terminal.print_measurements(choice.measurements, shown)
        verb = "takes" if choice.changed else "keeps"
        shown.print(f"{verb} {format_setting(choice.knob, choice.setting)}", style="bold", highlight=False)
        shown.print(f"{_describe_static_order(choice, static)}\n", highlight=False, soft_wrap=True)

    share = dataclasses.replace(limits, seconds=limits.seconds / len(cases))
    narrowed = [*(f"--knob={name}" for name in arguments.knob), f"--seconds={share.seconds:g}"]
    with StepProgress(console) as steps:
        for case in cases:
            static = _read_static_cycles(declared, case)
            tuned = timed_tuning.tune_by_time(
                implementation,
                declared,
                case,
                share,
                tolerances,
                knobs=knobs,
                on_step=steps.say,
                on_choice=on_choice,
            )
            if tuned.choices:
                # Write the table after each case, so that an interruption loses only the current case.
                _write_table(path, [_build_entry(implementation, declared, tuned, static, narrowed)])
                written += 1
            if interrupted := tuned.interrupted:
                interrupts.stop_raising()  # a second Ctrl-C must not cut off the files written below
                break
    shown.print(f"{written} entries written to {path}", highlight=False, soft_wrap=True)
    bench.write_outputs(outputs, measured, "tune", time.perf_counter() - started, interrupted=interrupted)
    return 0 if written and not interrupted else 2


def _get_tunable(implementation: Implementation) -> Tunable:
    """Return the implementation's declaration of knobs. Raises `CannotJudge` without one."""
    if implementation.tunable is None:
        raise CannotJudge(f"{implementation.name} declares nothing to tune (Implementation.tunable)")
    return implementation.tunable


def _choose_knobs(implementation: Implementation, declared: Tunable, asked: Sequence[str]) -> list[Knob]:
    """Return the knobs named in `asked`, or all if it is empty. Raises `CannotJudge` for other names."""
    known = {knob.name: knob for knob in declared.knobs}
    for name in asked:
        if name not in known:
            raise CannotJudge(f"{implementation.name} has no knob {name!r}: known are {', '.join(known)}")
    return [knob for knob in declared.knobs if not asked or knob.name in asked]


def _choose_cases(
    implementation: Implementation, declared: Tunable, knobs: Sequence[Knob], asked: Sequence[str], *, static: bool
) -> list[Case]:
    cases = [project_lookup.parse_case(text) for text in asked] or list(declared.cases())
    if static:
        return cases
    accelerator = implementation.accelerator
    if declared.native is not None and accelerator.platform not in (None, jax.default_backend()):
        missing = str(accelerator.platform).upper()
        raise CannotJudge(
            f"there is no {missing} to time {implementation.name} on: add --static to choose by static cycles instead"
        )
    for case in cases:
        for knob in knobs:
            if (declined := explain_not_timed(implementation, case, knob.phase)) is not None:
                raise CannotJudge(f"{implementation.name} cannot be tuned on {case.id}: {declined[1]}")
    return cases


def _read_static_cycles(declared: Tunable, case: Case) -> dict[str, dict[str, float]]:
    """Read the static cycles by knob and candidate that `tune --static` recorded for this device and case."""
    kind, key = jax.devices()[0].device_kind, dict(declared.key(case))
    entries = tunable.read_table(declared.table) if declared.table is not None else ()
    found = next((entry for entry in entries if entry.device == kind and dict(entry.key) == key), None)
    return {} if found is None else dict(found.provenance.get(static_tune.STATIC_CYCLES, {}))


def _describe_static_order(choice: KnobChoice, static: Mapping[str, Mapping[str, float]]) -> str:
    """Describe how far times and static cycles of a knob's candidates agree; empty if no cycles are recorded."""
    seconds = {
        name: row.seconds.median
        for row in choice.measurements
        for name in static.get(choice.knob, {})
        if row.implementation.endswith(f" {name}") and row.seconds is not None
    }
    return static_tuning.describe_rank_agreement(static.get(choice.knob, {}), seconds)


def _build_entry(
    implementation: Implementation,
    declared: Tunable,
    tuned: TuningResult,
    static: Mapping[str, Mapping[str, float]],
    narrowed: Sequence[str],
) -> TableEntry:
    held = {choice.knob: said for choice in tuned.choices if (said := _describe_static_order(choice, static))}
    return TableEntry(
        device=jax.devices()[0].device_kind,
        key=declared.key(tuned.case),
        settings={name: dict(setting) for name, setting in tuned.settings.items()},
        provenance={
            "case": tuned.case.id,
            "date": datetime.date.today().isoformat(),
            "jax": jax.__version__,
            "how": " ".join(
                [f"python -m conformance tune --impl={implementation.name} --case={tuned.case.id}", *narrowed]
            ),
            "knobs": {choice.knob: _describe_choice(choice) for choice in tuned.choices},
            **({static_tune.STATIC_CYCLES: static, "static order": held} if static else {}),
        },
    )


def _describe_choice(choice: KnobChoice) -> str:
    """Describe for the table how the chosen setting compares with the setting that it replaces."""
    tried = f"of {len(choice.measurements)} settings"
    if not choice.changed:
        return f"{format_setting(choice.knob, choice.before)} kept, {tried} none faster beyond the spread"
    name = format_setting(choice.knob, choice.setting)
    row = next(row for row in choice.measurements if row.implementation.endswith(name))
    if row.speed is None:
        return f"{tried}; {format_setting(choice.knob, choice.before)}, which it replaces, did not run"
    low, middle, high = row.speed
    return (
        f"{tried}, {middle:.3g} times the speed of {format_setting(choice.knob, choice.before)} "
        f"(quartiles {low:.3g} to {high:.3g} of {len(row.samples)} pairs)"
    )


def _write_table(path: Path, entries: Sequence[TableEntry]) -> None:
    try:
        tunable.write_table(path, tunable.merge_entries(tunable.read_table(path), entries))
    except (OSError, ValueError) as error:
        raise CannotJudge(f"the table cannot be written: {error}") from error
