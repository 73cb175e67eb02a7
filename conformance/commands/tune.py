"""`tune`: choose an implementation's settings by timing them on this machine, and keep them in its table."""

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
from conformance import interrupts, tunable
from conformance.bench import static_order, tuning
from conformance.bench.measurements import Measurement
from conformance.bench.side_by_side import why_not
from conformance.bench.tuning import Choice, Tuned, label
from conformance.commands import bench, lookup, static_tune
from conformance.commands.errors import CannotJudge
from conformance.commands.outputs import outputs_of, writable
from conformance.commands.progress import Steps
from conformance.contract import Implementation
from conformance.sandbox.kernel_options import KernelOptions
from conformance.tunable import Entry, Knob, Tunable
from reports import terminal


def tune(arguments: argparse.Namespace) -> int:
    """`tune`: time candidates, show them, and write the table."""
    started = time.perf_counter()
    limits = bench.limits_of(arguments)
    implementation = lookup.find(arguments.impl, KernelOptions(in_process=True))  # which are called in turns
    declared = _tunable(implementation)
    path = declared.table if arguments.out is None else writable(arguments.out, "out")
    if path is None:
        raise CannotJudge(f"{implementation.name} reads no table: say by --out where to write one")
    outputs = outputs_of(arguments)
    tolerances = lookup.load_settings().tolerances
    knobs = _knobs(implementation, declared, arguments.knob)
    cases = _cases(implementation, declared, knobs, arguments.case, static=arguments.static)
    if arguments.static:
        return static_tune.choose(implementation, declared, cases, static_tune.targets(arguments.target), knobs, path)
    console, shown = Console(stderr=True), Console()
    bench.warn_of_flags(console)
    measured: list[Measurement] = []
    written, interrupted = 0, False
    static: dict[str, dict[str, float]] = {}  # of the case that is tuned

    def on_choice(choice: Choice) -> None:
        measured.extend(choice.measurements)
        terminal.print_measurements(choice.measurements, shown)
        verb = "takes" if choice.changed else "keeps"
        shown.print(f"{verb} {label(choice.knob, choice.setting)}", style="bold", highlight=False)
        shown.print(f"{_order(choice, static)}\n", highlight=False, soft_wrap=True)

    share = dataclasses.replace(limits, seconds=limits.seconds / len(cases))
    narrowed = [*(f"--knob={name}" for name in arguments.knob), f"--seconds={share.seconds:g}"]
    with Steps(console) as steps:
        for case in cases:
            static = _static(declared, case)
            tuned = tuning.tune(
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
                # After each case: what is tuned is kept, whatever happens to the rest.
                _write(path, [_entry(implementation, declared, tuned, static, narrowed)])
                written += 1
            if interrupted := tuned.interrupted:
                interrupts.finish()  # what was timed gets written whole
                break
    shown.print(f"{written} entries written to {path}", highlight=False, soft_wrap=True)
    bench.write(outputs, measured, "tune", time.perf_counter() - started, interrupted=interrupted)
    return 0 if written and not interrupted else 2


def _tunable(implementation: Implementation) -> Tunable:
    if implementation.tunable is None:
        raise CannotJudge(f"{implementation.name} declares nothing to tune (Implementation.tunable)")
    return implementation.tunable


def _knobs(implementation: Implementation, declared: Tunable, asked: Sequence[str]) -> list[Knob]:
    known = {knob.name: knob for knob in declared.knobs}
    for name in asked:
        if name not in known:
            raise CannotJudge(f"{implementation.name} has no knob {name!r}: known are {', '.join(known)}")
    return [knob for knob in declared.knobs if not asked or knob.name in asked]


def _cases(
    implementation: Implementation, declared: Tunable, knobs: Sequence[Knob], asked: Sequence[str], *, static: bool
) -> list[Case]:
    cases = [lookup.case(text) for text in asked] or list(declared.cases())
    if static:
        return cases
    accelerator = implementation.accelerator
    if declared.native is not None and accelerator.platform not in (None, jax.default_backend()):
        missing = str(accelerator.platform).upper()
        raise CannotJudge(f"there is no {missing} to time {implementation.name} on: add --static, and no clock decides")
    for case in cases:
        for knob in knobs:
            if (declined := why_not(implementation, case, knob.phase)) is not None:
                raise CannotJudge(f"{implementation.name} cannot be tuned on {case.id}: {declined[1]}")
    return cases


def _static(declared: Tunable, case: Case) -> dict[str, dict[str, float]]:
    """Cycles of candidates by knob, as `tune --static` left them for this device and case; empty if it did not."""
    kind, key = jax.devices()[0].device_kind, dict(declared.key(case))
    entries = tunable.read(declared.table) if declared.table is not None else ()
    found = next((entry for entry in entries if entry.device == kind and dict(entry.key) == key), None)
    return {} if found is None else dict(found.provenance.get(static_tune.STATIC, {}))


def _order(choice: Choice, static: Mapping[str, Mapping[str, float]]) -> str:
    """How the static cycles of the candidates held; empty where there are none."""
    seconds = {
        name: row.seconds.median
        for row in choice.measurements
        for name in static.get(choice.knob, {})
        if row.implementation.endswith(f" {name}") and row.seconds is not None
    }
    return static_order.sentence(static.get(choice.knob, {}), seconds)


def _entry(
    implementation: Implementation,
    declared: Tunable,
    tuned: Tuned,
    static: Mapping[str, Mapping[str, float]],
    narrowed: Sequence[str],
) -> Entry:
    held = {choice.knob: said for choice in tuned.choices if (said := _order(choice, static))}
    return Entry(
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
            "knobs": {choice.knob: _told(choice) for choice in tuned.choices},
            **({static_tune.STATIC: static, "static order": held} if static else {}),
        },
    )


def _told(choice: Choice) -> str:
    """How the setting compared to what it replaces."""
    tried = f"of {len(choice.measurements)} settings"
    if not choice.changed:
        return f"{label(choice.knob, choice.before)} kept, {tried} none faster beyond the spread"
    name = label(choice.knob, choice.setting)
    row = next(row for row in choice.measurements if row.implementation.endswith(name))
    if row.speed is None:
        return f"{tried}; {label(choice.knob, choice.before)}, which it replaces, did not run"
    low, middle, high = row.speed
    return (
        f"{tried}, {middle:.3g} times the speed of {label(choice.knob, choice.before)} "
        f"(quartiles {low:.3g} to {high:.3g} of {len(row.samples)} pairs)"
    )


def _write(path: Path, entries: Sequence[Entry]) -> None:
    try:
        tunable.write(path, tunable.merged(tunable.read(path), entries))
    except (OSError, ValueError) as error:
        raise CannotJudge(f"the table cannot be written: {error}") from error
