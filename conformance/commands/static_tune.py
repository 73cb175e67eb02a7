"""`tune --static`: choose settings for TPUs that are not here, by their compiler's schedules, and keep them."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from cases.case import Case
from conformance import tunable
from conformance.accelerators import compilation, speed_bar
from conformance.accelerators.targets import CompileTarget, targets_of
from conformance.accelerators.tpus import TPUS
from conformance.bench import static_tuning
from conformance.bench.static_tuning import Estimate, StaticChoice, Told
from conformance.bench.tuning import label
from conformance.calling.execution import Executor
from conformance.commands import cycles
from conformance.commands.errors import CannotJudge
from conformance.commands.progress import Steps
from conformance.contract import Implementation
from conformance.driving import compiled
from conformance.tunable import Entry, Knob, Tunable

STATIC = "static cycles"
"""Of an entry's provenance: cycles of every candidate, by knob."""


def targets(names: Sequence[str]) -> list[CompileTarget]:
    """The generations that are named, or all. Raises `CannotJudge` where there is no compiler, or no such chip."""
    if (reason := cycles.why_not()) is not None:
        raise CannotJudge(reason)
    known = {target.name: target for target in targets_of("tpu")}
    if wrong := [name for name in names if name not in known]:
        raise CannotJudge(f"no TPU is called {wrong[0]}: known are {', '.join(known)}")
    return [known[name] for name in names or known]


def choose(
    implementation: Implementation,
    declared: Tunable,
    cases: Sequence[Case],
    chips: Sequence[CompileTarget],
    knobs: Sequence[Knob],
    path: Path,
) -> int:
    """Choose for each chip and case, show every candidate, and write the table as it goes."""
    if declared.native is None or not all(knob.kernel or knob.ways for knob in knobs):
        raise CannotJudge(f"{implementation.name} says nothing that can be tuned by schedules (Tunable.native)")
    shown, written = Console(), 0
    told = functools.partial(_told, gradients=any(knob.phase != "forward" for knob in knobs))
    shown.print("Static cycles of a whole call, never checked on a chip.", highlight=False)
    with Steps(Console(stderr=True)) as steps:
        for chip in chips:
            for case in cases:
                found = static_tuning.tune(implementation, declared, case, chip, told, knobs=knobs, on_step=steps.say)
                for choice in found:
                    _show(shown, chip, case, choice)
                _write(path, _entry(implementation, declared, case, chip, found))
                written += 1
    shown.print(f"{written} entries written to {path}", highlight=False, soft_wrap=True)
    return 0 if written else 2


def _told(executor: Executor, problem: Any, chip: CompileTarget, *, gradients: bool) -> Told:
    one = compiled.fullest(executor, problem, chip, gradients=gradients)
    return one.figures if one.outcome == "compiled" else f"refused: {one.reason}"


def _show(shown: Console, chip: CompileTarget, case: Case, choice: StaticChoice) -> None:
    for one in choice.estimates:
        name = f"{chip.name} {label(choice.knob, one.setting)}"
        text = one.reason if one.cycles is None else _cycles(one)
        shown.print(f"  {name}: {text}", highlight=False, soft_wrap=True)
    verb = "keeps" if dict(choice.setting) == dict(choice.before) else "takes"
    text = f"{chip.name} {verb} {label(choice.knob, choice.setting)}, {case.id}"
    shown.print(text, style="bold", highlight=False, soft_wrap=True)


def _entry(
    implementation: Implementation, declared: Tunable, case: Case, chip: CompileTarget, found: Sequence[StaticChoice]
) -> Entry:
    with compilation.for_chip(chip):  # of knobs that were not asked for, what is in force
        settings = {name: dict(setting) for name, setting in declared.settings(case).items()}
    settings |= {choice.knob: dict(choice.setting) for choice in found}
    kernels = {knob.name for knob in declared.knobs if knob.kernel}
    (kind,) = (tpu.kind for tpu in TPUS if tpu.name == chip.name)
    how = f"python -m conformance tune --static --impl={implementation.name} --target={chip.name} --case={case.id}"
    how += "".join(f" --knob={choice.knob}" for choice in found if len(found) < len(declared.knobs))
    return Entry(
        device=kind,
        key=declared.key(case),
        settings=settings,
        provenance={
            "case": case.id,
            "compiler": speed_bar.compiler(),
            "jax": importlib.metadata.version("jax"),
            "how": how,
            "checked": "by no chip: static cycles of a whole call",
            "knobs": {choice.knob: _figures(choice) for choice in found},
            # What a clock is held against, once there is one.
            STATIC: {choice.knob: _whole(choice) for choice in found if choice.knob in kernels},
        },
    )


def _whole(choice: StaticChoice) -> dict[str, float]:
    """Cycles of each candidate whose are known, with what is done beside it."""
    return {label(choice.knob, one.setting): round(one.whole) for one in choice.estimates if one.cycles is not None}


def _figures(choice: StaticChoice) -> str:
    """The figures of a choice: of what was chosen, of what it replaced, and how many were tried."""
    now, before = choice.of(choice.setting), choice.of(choice.before)
    refused = sum(one.cycles is None for one in choice.estimates)
    before_it = f"where {label(choice.knob, choice.before)} has {_cycles(before)}"
    return f"{_cycles(now)}, {before_it}; of {len(choice.estimates)} settings, {refused} refused"


def _cycles(one: Estimate) -> str:
    if one.cycles is None:
        return "no cycles known"
    return f"{one.cycles:,.0f} cycles" + (f" and {one.beside:,.0f} of HBM beside them" if one.beside else "")


def _write(path: Path, entry: Entry) -> None:
    try:
        kept = tunable.read(path)
        for old in kept:  # what was said of knobs that were not asked for
            if old.place == entry.place:
                said = {name: {**old.provenance.get(name, {}), **entry.provenance[name]} for name in ("knobs", STATIC)}
                entry = dataclasses.replace(entry, provenance={**entry.provenance, **said})
        tunable.write(path, tunable.merged(kept, [entry]))
    except (OSError, ValueError) as error:
        raise CannotJudge(f"the table cannot be written: {error}") from error
