"""Implement `tune --static`: choose an implementation's settings for TPUs that this machine lacks.

Candidate settings (block sizes and the like) are compared by static cycles, which are estimated from the compiler's
schedules (`conformance.cost.static.static_tuning`). The chosen settings are written to the implementation's table.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from cases.case import Case
from conformance.accelerators import compilation
from conformance.accelerators.targets import CompileTarget, list_targets
from conformance.accelerators.tpus import TPUS
from conformance.commands.progress_display import StepProgress
from conformance.cost.commands import cycles
from conformance.cost.static import cycle_baselines, static_tuning
from conformance.cost.static.static_tuning import CompileResult, Estimate, StaticChoice
from conformance.cost.timing.timed_tuning import format_setting
from conformance.execution.executor import Executor
from conformance.executor_tasks import native_compilation
from conformance.session.failures import CannotJudge
from impls.contract import tunable
from impls.contract.implementation import Implementation
from impls.contract.tunable import TableEntry, Tunable, TuningParameter

STATIC_CYCLES = "static cycles"
"""Key in the provenance of a table entry. Its value maps parameters to the static cycles of candidates, by name."""


def choose_targets(names: Sequence[str]) -> list[CompileTarget]:
    """Return the named TPU generations, or all of them if `names` is empty.

    Raises:
      CannotJudge: if the TPU compiler is missing, or a name is unknown.
    """
    if (reason := cycles.explain_unavailable()) is not None:
        raise CannotJudge(reason)
    known = {target.name: target for target in list_targets("tpu")}
    if wrong := [name for name in names if name not in known]:
        raise CannotJudge(f"no TPU is called {wrong[0]}: known are {', '.join(known)}")
    return [known[name] for name in names or known]


def choose_settings(
    implementation: Implementation,
    declared: Tunable,
    cases: Sequence[Case],
    chips: Sequence[CompileTarget],
    parameters: Sequence[TuningParameter],
    path: Path,
) -> int:
    """Choose settings for each chip and case, print every candidate, and write the table after each case.

    Args:
      implementation: the implementation to tune.
      declared: the implementation's declaration of parameters.
      cases: the cases to compile.
      chips: the TPU generations to compile for.
      parameters: the parameters to choose.
      path: the file with the table of settings.

    Returns:
      the exit code.

    Raises:
      CannotJudge: if the implementation declares no parameters that can be tuned by schedules, or the table cannot be
        written.
    """
    if declared.native is None or not all(one.kernel or one.ways for one in parameters):
        raise CannotJudge(f"{implementation.name} declares nothing that schedules can tune (Tunable.native)")
    shown, written = Console(), 0
    told = functools.partial(_compile_call, gradients=any(one.phase != "forward" for one in parameters))
    shown.print("Static cycles of a whole call, which no chip has confirmed.", highlight=False)
    with StepProgress(Console(stderr=True)) as steps:
        for chip in chips:
            for case in cases:
                found = static_tuning.tune_statically(
                    implementation, declared, case, chip, told, parameters=parameters, on_step=steps.say
                )
                for choice in found:
                    _print_choice(shown, chip, case, choice)
                _write_entry(path, _build_entry(implementation, declared, case, chip, found))
                written += 1
    shown.print(f"{written} entries written to {path}", highlight=False, soft_wrap=True)
    return 0 if written else 2


def _compile_call(executor: Executor, problem: Any, chip: CompileTarget, *, gradients: bool) -> CompileResult:
    one = native_compilation.compile_largest_program(executor, problem, chip, gradients=gradients)
    return one.figures if one.outcome == "compiled" else f"refused: {one.reason}"


def _print_choice(shown: Console, chip: CompileTarget, case: Case, choice: StaticChoice) -> None:
    for one in choice.estimates:
        name = f"{chip.name} {format_setting(choice.parameter, one.setting)}"
        text = one.reason if one.cycles is None else _format_cycles(one)
        shown.print(f"  {name}: {text}", highlight=False, soft_wrap=True)
    verb = "keeps" if dict(choice.setting) == dict(choice.before) else "takes"
    text = f"{chip.name} {verb} {format_setting(choice.parameter, choice.setting)}, {case.id}"
    shown.print(text, style="bold", highlight=False, soft_wrap=True)


def _build_entry(
    implementation: Implementation, declared: Tunable, case: Case, chip: CompileTarget, found: Sequence[StaticChoice]
) -> TableEntry:
    with compilation.trace_for_chip(chip):  # read the settings in force, which parameters that are not tuned keep
        settings = {name: dict(setting) for name, setting in declared.settings(case).items()}
    settings |= {choice.parameter: dict(choice.setting) for choice in found}
    kernels = {one.name for one in declared.parameters if one.kernel}
    (kind,) = (tpu.kind for tpu in TPUS if tpu.name == chip.name)
    how = f"python -m conformance tune --static --impl={implementation.name} --target={chip.name} --case={case.id}"
    how += "".join(f" --parameter={choice.parameter}" for choice in found if len(found) < len(declared.parameters))
    return TableEntry(
        device=kind,
        key=declared.key(case),
        settings=settings,
        provenance={
            "case": case.id,
            "compiler": cycle_baselines.get_compiler_version(),
            "jax": importlib.metadata.version("jax"),
            "how": how,
            "checked": "by no chip: static cycles of a whole call",
            "knobs": {choice.parameter: _format_choice(choice) for choice in found},
            # When `tune` times candidates on a chip, it compares their order with these cycles.
            STATIC_CYCLES: {one.parameter: _collect_cycles(one) for one in found if one.parameter in kernels},
        },
    )


def _collect_cycles(choice: StaticChoice) -> dict[str, float]:
    """Return the cycles of each candidate with a known estimate, including HBM traffic outside the call, by name."""
    return {
        format_setting(choice.parameter, x.setting): round(x.whole) for x in choice.estimates if x.cycles is not None
    }


def _format_choice(choice: StaticChoice) -> str:
    """Describe a choice for the table: cycles of the chosen and the replaced setting, and the number of candidates."""
    now, before = choice.of(choice.setting), choice.of(choice.before)
    refused = sum(one.cycles is None for one in choice.estimates)
    before_it = f"where {format_setting(choice.parameter, choice.before)} has {_format_cycles(before)}"
    return f"{_format_cycles(now)}, {before_it}; of {len(choice.estimates)} settings, {refused} refused"


def _format_cycles(one: Estimate) -> str:
    if one.cycles is None:
        return "no cycles known"
    return f"{one.cycles:,.0f} cycles" + (f" and {one.beside:,.0f} of HBM beside them" if one.beside else "")


def _write_entry(path: Path, entry: TableEntry) -> None:
    try:
        kept = tunable.read_table(path)
        for old in kept:  # an entry for the same place keeps the provenance of parameters that were not tuned
            if old.place == entry.place:
                said = {
                    name: {**old.provenance.get(name, {}), **entry.provenance[name]}
                    for name in ("knobs", STATIC_CYCLES)
                }
                entry = dataclasses.replace(entry, provenance={**entry.provenance, **said})
        tunable.write_table(path, tunable.merge_entries(kept, [entry]))
    except (OSError, ValueError) as error:
        raise CannotJudge(f"the table cannot be written: {error}") from error
