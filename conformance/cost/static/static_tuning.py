"""Choose an implementation's settings (block sizes and the like) without its accelerator, by static cycles.

A *parameter* is the setting of one kernel, and its *candidates* are the settings to try (`impls.contract.tunable`).
Every candidate is compiled for a TPU, and the cycles of the kernel's call are estimated from the compiler's schedule
(`conformance.cost.tpu.tpu_figures`). The estimate is deterministic, and no chip has confirmed it. The command `tune
--static` writes the chosen settings to the implementation's table.

Candidates are ordered: first the setting in force, then the others in the order of the implementation. The first
candidate is chosen whose cycles exceed the fewest by at most `SCHEDULING_NOISE`. A candidate that does not compile, or
whose cycles are not known, is shown and never chosen.

The cycles of a call are at least the cycles in which HBM transfers the call's data. Other traffic of a kernel
(`TuningParameter.traffic`) is added. If several sets of kernels compute the same results, the first set is chosen,
unless another set is shorter by more than `MIN_SAVING`. This margin is larger, because sums over several kernels are
less exact than two schedules of the same kernel.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

from cases.case import Case
from cases.operand_values import draw_problem
from conformance.accelerators import compilation
from conformance.accelerators.targets import CompileTarget
from conformance.accelerators.tpus import TPUS
from conformance.cost.timing.timed_tuning import format_setting
from conformance.execution.executor import Executor
from impls.contract.implementation import Implementation
from impls.contract.tunable import ParameterSettings, Setting, Traffic, Tunable, TuningParameter

SCHEDULING_NOISE = 0.03
"""Relative difference of cycles below which candidates count as equal: the compiler's scheduling varies this much."""
MIN_SAVING = 0.05
"""Relative saving of cycles by which a set of kernels must beat an earlier set to be chosen instead."""

CompileResult = Mapping[str, float] | str
"""Result of compiling a call: measurements of the program by name, or the reason why it does not compile."""
CompileCall = Callable[[Executor, object, CompileTarget], CompileResult]
"""A function that compiles a call of an executor's implementation on a problem, for one chip."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The static cycles of one candidate setting.

    Attributes:
      setting: the candidate setting.
      cycles: cycles of the kernel's call with this setting; None if they are not known.
      reason: the reason why the cycles are not known; otherwise empty.
      beside: cycles of HBM transfers before and after the call (`TuningParameter.traffic`).
    """

    setting: Setting
    cycles: float | None
    reason: str = ""
    beside: float = 0.0

    @property
    def whole(self) -> float:
        """Cycles of the call plus transfers before and after it; infinite if the cycles of the call are not known."""
        return float("inf") if self.cycles is None else self.cycles + self.beside


@dataclasses.dataclass(frozen=True)
class StaticChoice:
    """Result of choosing one parameter's setting.

    Attributes:
      parameter: name of the parameter.
      setting: the chosen setting.
      before: the setting that was in force before tuning.
      estimates: the estimate of each candidate, in order.
    """

    parameter: str
    setting: Setting
    before: Setting
    estimates: tuple[Estimate, ...]

    def of(self, setting: Setting) -> Estimate:
        """Return the estimate of a candidate setting."""
        return next(one for one in self.estimates if dict(one.setting) == dict(setting))


def tune_statically(
    implementation: Implementation,
    tunable: Tunable,
    case: Case,
    target: CompileTarget,
    compiled: CompileCall,
    *,
    parameters: Sequence[TuningParameter],
    on_step: Callable[[str], None] = lambda text: None,
) -> list[StaticChoice]:
    """Choose the settings of some parameters by static cycles, for one case and one chip.

    To save compilations, the kernels of one call are compiled together: all with their first candidates, then all with
    their second candidates, and so on.

    Args:
      implementation: the implementation to tune.
      tunable: the implementation's declaration of parameters, which must have a `native` call.
      case: the case to compile.
      target: the chip to compile for.
      compiled: function that compiles a call of the problem, with gradients if a parameter belongs to the backward
        pass.
      parameters: the parameters to choose. If one of them chooses among kernels, kernels whose parameter is not in
        `parameters` keep the setting in force.
      on_step: function that is called with a description of each step, for the progress display.

    Returns:
      the choice for each of `parameters`, in the same order.
    """
    native = tunable.native
    assert native is not None
    with compilation.trace_for_chip(target):
        base = {name: dict(setting) for name, setting in tunable.settings(case).items()}
    asked = {one.name for one in parameters}
    needed = asked | {name for one in parameters for _, names in one.ways for name in names}
    kernels = [one for one in tunable.parameters if one.kernel and one.name in needed]
    tried = {
        one.name: _remove_duplicates([base[one.name], *(one.candidates(case) if one.name in asked else ())])
        for one in kernels
    }
    problem, known = draw_problem(case), dict[str, CompileResult]()

    def ask(settings: ParameterSettings) -> CompileResult:
        name = ", ".join(format_setting(name, settings[name]) for name in settings)
        if name not in known:
            on_step(f"compiling {target.name}: {name}")
            accelerator = dataclasses.replace(implementation.accelerator, native=native(settings))
            variant = dataclasses.replace(implementation, accelerator=accelerator)
            known[name] = compiled(Executor(variant), problem, target)
        return known[name]

    found: dict[str, list[Estimate]] = {one.name: [] for one in kernels}
    for together in _group_by_call(kernels):
        given = next((one.given for one in together if one.given), {})
        for turn in range(max(len(tried[parameter.name]) for parameter in together)):
            now = [(one, tried[one.name][turn]) for one in together if turn < len(tried[one.name])]
            told = ask({**base, **given, **{parameter.name: setting for parameter, setting in now}})
            for parameter, setting in now:
                # If these settings do not compile together, each may compile with the other kernels' settings in force.
                own = ask({**base, **given, parameter.name: setting}) if isinstance(told, str) else told
                found[parameter.name].append(
                    _estimate_candidate(parameter, setting, own, parameter.traffic(case, setting), target)
                )
    choices = {name: _choose_setting(name, estimates) for name, estimates in found.items()}
    choices |= {one.name: _choose_kernels(one, base[one.name], choices) for one in parameters if one.ways}
    return [choices[one.name] for one in parameters]


def _group_by_call(parameters: Sequence[TuningParameter]) -> list[list[TuningParameter]]:
    """Group the parameters whose kernels can be compiled in one call.

    Parameters that require the same settings of other parameters (`TuningParameter.given`) form a group. Parameters
    without such requirements join the first group.
    """
    found: dict[str, list[TuningParameter]] = {}
    for parameter in sorted(parameters, key=lambda parameter: not parameter.given):
        found.setdefault(str(parameter.given) if parameter.given else next(iter(found), ""), []).append(parameter)
    return list(found.values())


def _remove_duplicates(settings: Sequence[Setting]) -> list[Setting]:
    """Remove settings that equal an earlier one; keep the order."""
    return [one for place, one in enumerate(settings) if dict(one) not in [dict(other) for other in settings[:place]]]


def _estimate_candidate(
    parameter: TuningParameter, setting: Setting, told: CompileResult, traffic: Traffic, target: CompileTarget
) -> Estimate:
    """Build the estimate of a candidate from the result of compiling it.

    Args:
      parameter: the parameter that the candidate is for.
      setting: the candidate setting.
      told: measurements of the compiled program, or the reason why it does not compile.
      traffic: HBM traffic of the kernel besides its blocks.
      target: the chip, which determines the HBM bandwidth.
    """
    if isinstance(told, str):
        return Estimate(setting, None, told)
    kernel = next((name.rpartition(".")[0] for name in told if name.endswith(f"{parameter.kernel}.call_cycles")), None)
    if kernel is None:
        return Estimate(setting, None, "the cycles of its call are not known")
    if traffic == Traffic():
        return Estimate(setting, told[f"{kernel}.call_cycles"])
    (bytes_a_cycle,) = (tpu.bytes_a_cycle for tpu in TPUS if tpu.name == target.name)
    floor = told[f"{kernel}.hbm_floor_cycles"] + traffic.within / bytes_a_cycle
    return Estimate(setting, max(told[f"{kernel}.call_cycles"], floor), beside=traffic.beside / bytes_a_cycle)


def _choose_setting(parameter: str, estimates: Sequence[Estimate]) -> StaticChoice:
    """Choose the first candidate whose cycles exceed the fewest by at most `SCHEDULING_NOISE`.

    The first estimate is that of the setting in force, which is kept if no candidate has known cycles.
    """
    before, least = estimates[0].setting, min(one.whole for one in estimates)
    few = (one.setting for one in estimates if one.cycles is not None and one.whole <= (1 + SCHEDULING_NOISE) * least)
    return StaticChoice(parameter, next(few, before), before, tuple(estimates))


def _choose_kernels(parameter: TuningParameter, before: Setting, choices: Mapping[str, StaticChoice]) -> StaticChoice:
    """Choose among the sets of kernels of a parameter (`TuningParameter.ways`), with each kernel at its chosen setting.

    The first set is chosen, unless another set is shorter by more than `MIN_SAVING`.

    Args:
      parameter: a parameter that chooses among sets of kernels.
      before: the parameter's setting in force, which is kept if the chosen set has no known cycles.
      choices: by name of a kernel's parameter, its choice.
    """
    estimates = []
    for setting, names in parameter.ways:
        parts = [choices[name].of(choices[name].setting) for name in names]
        reasons = [f"{name}: {part.reason}" for name, part in zip(names, parts, strict=True) if part.cycles is None]
        cycles = None if reasons else sum(part.cycles or 0.0 for part in parts)
        estimates.append(Estimate(setting, cycles, "; ".join(reasons), sum(part.beside for part in parts)))
    taken = estimates[0]
    for other in estimates[1:]:
        if other.whole < (1 - MIN_SAVING) * taken.whole:
            taken = other
    return StaticChoice(parameter.name, taken.setting if taken.cycles is not None else before, before, tuple(estimates))


def describe_rank_agreement(static: Mapping[str, float], seconds: Mapping[str, float]) -> str:
    """Describe in one sentence how many pairs of candidates have the same order by static cycles and by time.

    Only pairs count whose static cycles differ by more than `MIN_SAVING`. If there are no such pairs, the text is
    empty. Only candidates that are in both mappings are compared.

    Args:
      static: static cycles of a call, by name of the candidate.
      seconds: median seconds of a call on the chip, by name of the candidate.
    """
    both = sorted((cycles, name) for name, cycles in static.items() if name in seconds)
    told = [
        (one, other) for (few, one), (many, other) in itertools.combinations(both, 2) if many > (1 + MIN_SAVING) * few
    ]
    if not told:
        return ""
    alike = sum(seconds[one] < seconds[other] for one, other in told)
    pairs = f"{alike} of {len(told)} pairs of candidates"
    return f"static cycles that differ by more than {MIN_SAVING:.0%} put {pairs} in the order of the clock"
