"""Choose an implementation's settings (block sizes and the like) without its accelerator, by static cycles.

A *knob* is the setting of one kernel, and its *candidates* are the settings to try (`impls.contract.tunable`). Every
candidate is compiled for a TPU, and the cycles of the kernel's call are estimated from the compiler's schedule
(`conformance.cost.tpu.tpu_figures`). The estimate is deterministic, and no chip has confirmed it. The command `tune
--static` writes the chosen settings to the implementation's table.

Candidates are ordered: first the setting in force, then the others in the order of the implementation. The first
candidate is chosen whose cycles exceed the fewest by at most `SCHEDULING_NOISE`. A candidate that does not compile, or
whose cycles are not known, is shown and never chosen.

The cycles of a call are at least the cycles in which HBM transfers the call's data. Other traffic of a kernel
(`Knob.traffic`) is added. If several sets of kernels compute the same results, the first set is chosen, unless another
set is shorter by more than `MIN_SAVING`. This margin is larger, because sums over several kernels are less exact than
two schedules of the same kernel.
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
from impls.contract.tunable import Knob, KnobSettings, Setting, Traffic, Tunable

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
      cycles: cycles of the kernel's call with this setting; None if they are not known.
      beside: cycles of HBM transfers before and after the call (`Knob.traffic`).
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
    """Result of choosing one knob's setting.

    Attributes:
      knob: name of the knob.
      setting: the chosen setting.
      before: the setting that was in force before tuning.
      estimates: the estimate of each candidate, in order.
    """

    knob: str
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
    knobs: Sequence[Knob],
    on_step: Callable[[str], None] = lambda text: None,
) -> list[StaticChoice]:
    """Choose the settings of some knobs by static cycles, for one case and one chip.

    To save compilations, the kernels of one call are compiled together: all with their first candidates, then all with
    their second candidates, and so on.

    Args:
      tunable: the implementation's declaration of knobs, which must have a `native` call.
      compiled: function that compiles a call of the problem, with gradients if a knob belongs to the backward pass.
      knobs: the knobs to choose. If one of them chooses among kernels, kernels whose knob is not in `knobs` keep the
        setting in force.

    Returns:
      the choice for each of `knobs`, in the same order.
    """
    native = tunable.native
    assert native is not None
    with compilation.trace_for_chip(target):
        base = {name: dict(setting) for name, setting in tunable.settings(case).items()}
    asked = {knob.name for knob in knobs}
    needed = asked | {name for knob in knobs for _, names in knob.ways for name in names}
    kernels = [knob for knob in tunable.knobs if knob.kernel and knob.name in needed]
    tried = {
        knob.name: _remove_duplicates([base[knob.name], *(knob.candidates(case) if knob.name in asked else ())])
        for knob in kernels
    }
    problem, known = draw_problem(case), dict[str, CompileResult]()

    def ask(settings: KnobSettings) -> CompileResult:
        name = ", ".join(format_setting(knob, settings[knob]) for knob in settings)
        if name not in known:
            on_step(f"compiling {target.name}: {name}")
            accelerator = dataclasses.replace(implementation.accelerator, native=native(settings))
            variant = dataclasses.replace(implementation, accelerator=accelerator)
            known[name] = compiled(Executor(variant), problem, target)
        return known[name]

    found: dict[str, list[Estimate]] = {knob.name: [] for knob in kernels}
    for together in _group_by_call(kernels):
        given = next((knob.given for knob in together if knob.given), {})
        for turn in range(max(len(tried[knob.name]) for knob in together)):
            now = [(knob, tried[knob.name][turn]) for knob in together if turn < len(tried[knob.name])]
            told = ask({**base, **given, **{knob.name: setting for knob, setting in now}})
            for knob, setting in now:
                # If these settings do not compile together, each may compile with the other kernels' settings in force.
                own = ask({**base, **given, knob.name: setting}) if isinstance(told, str) else told
                found[knob.name].append(_estimate_candidate(knob, setting, own, knob.traffic(case, setting), target))
    choices = {name: _choose_setting(name, estimates) for name, estimates in found.items()}
    choices |= {knob.name: _choose_kernels(knob, base[knob.name], choices) for knob in knobs if knob.ways}
    return [choices[knob.name] for knob in knobs]


def _group_by_call(knobs: Sequence[Knob]) -> list[list[Knob]]:
    """Group the knobs that can be compiled in one call: those that require the same settings (`Knob.given`)."""
    found: dict[str, list[Knob]] = {}
    for knob in sorted(knobs, key=lambda knob: not knob.given):
        found.setdefault(str(knob.given) if knob.given else next(iter(found), ""), []).append(knob)
    return list(found.values())


def _remove_duplicates(settings: Sequence[Setting]) -> list[Setting]:
    """Remove settings that equal an earlier one; keep the order."""
    return [one for place, one in enumerate(settings) if dict(one) not in [dict(other) for other in settings[:place]]]


def _estimate_candidate(
    knob: Knob, setting: Setting, told: CompileResult, traffic: Traffic, target: CompileTarget
) -> Estimate:
    """Build a candidate's estimate from its measurements, or why it does not compile, and further HBM traffic."""
    if isinstance(told, str):
        return Estimate(setting, None, told)
    kernel = next((name.rpartition(".")[0] for name in told if name.endswith(f"{knob.kernel}.call_cycles")), None)
    if kernel is None:
        return Estimate(setting, None, "the cycles of its call are not known")
    if traffic == Traffic():
        return Estimate(setting, told[f"{kernel}.call_cycles"])
    (bytes_a_cycle,) = (tpu.bytes_a_cycle for tpu in TPUS if tpu.name == target.name)
    floor = told[f"{kernel}.hbm_floor_cycles"] + traffic.within / bytes_a_cycle
    return Estimate(setting, max(told[f"{kernel}.call_cycles"], floor), beside=traffic.beside / bytes_a_cycle)


def _choose_setting(knob: str, estimates: Sequence[Estimate]) -> StaticChoice:
    """Choose the first candidate whose cycles exceed the fewest by at most `SCHEDULING_NOISE`.

    The first estimate is that of the setting in force, which is kept if no candidate has known cycles.
    """
    before, least = estimates[0].setting, min(one.whole for one in estimates)
    few = (one.setting for one in estimates if one.cycles is not None and one.whole <= (1 + SCHEDULING_NOISE) * least)
    return StaticChoice(knob, next(few, before), before, tuple(estimates))


def _choose_kernels(knob: Knob, before: Setting, choices: Mapping[str, StaticChoice]) -> StaticChoice:
    """Choose among the sets of kernels of a knob (`Knob.ways`), with each kernel at its chosen setting.

    The first set is chosen, unless another set is shorter by more than `MIN_SAVING`.

    Args:
      before: the knob's setting in force, which is kept if the chosen set has no known cycles.
    """
    estimates = []
    for setting, names in knob.ways:
        parts = [choices[name].of(choices[name].setting) for name in names]
        reasons = [f"{name}: {part.reason}" for name, part in zip(names, parts, strict=True) if part.cycles is None]
        cycles = None if reasons else sum(part.cycles or 0.0 for part in parts)
        estimates.append(Estimate(setting, cycles, "; ".join(reasons), sum(part.beside for part in parts)))
    taken = estimates[0]
    for other in estimates[1:]:
        if other.whole < (1 - MIN_SAVING) * taken.whole:
            taken = other
    return StaticChoice(knob.name, taken.setting if taken.cycles is not None else before, before, tuple(estimates))


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
