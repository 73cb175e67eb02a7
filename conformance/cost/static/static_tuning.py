"""Choose an implementation's settings without its accelerator, by the static cycles of its compiler's schedules.

Every candidate is compiled, and the cycles of its kernel's call are estimated (`conformance.cost.tpu.tpu_figures`).
That is deterministic, and no chip has confirmed it. The first candidate is chosen whose cycles do not clearly exceed
the fewest. The setting in force comes first, then the others in the order of the implementation. A candidate that does
not compile, or whose cycles are not known, is shown and never chosen.

The cycles of a call are at least those in which HBM transfers everything for it. Other traffic of a kernel
(`Knob.traffic`) is added. If several sets of kernels compute the same results, the first is chosen unless another is
shorter by more than `MIN_SAVING`. Sums over kernels are less exact than two schedules of one kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from cases.case import Case
from cases.operand_values import draw_problem
from conformance.accelerators import compilation
from conformance.accelerators.targets import CompileTarget
from conformance.accelerators.tpus import TPUS
from conformance.contract import Implementation
from conformance.cost.timing.timed_tuning import format_setting
from conformance.execution.executor import Executor
from conformance.tunable import Knob, KnobSettings, Setting, Traffic, Tunable

SCHEDULING_NOISE = 0.03
"""Relative difference of cycles that means nothing: the scheduling itself varies by this much."""
MIN_SAVING = 0.05
"""Relative saving by which one set of kernels must be shorter than another."""

CompileResult = Mapping[str, float] | str
"""Result of compiling: figures, or why there are none."""
CompileCall = Callable[[Executor, object, CompileTarget], CompileResult]


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The static cycles of a candidate.

    Attributes:
      setting: the candidate.
      cycles: cycles of its kernel's call; None if they are not known.
      reason: why they are not known.
      beside: cycles in which HBM transfers what else the kernel needs (`Knob.traffic`).
    """

    setting: Setting
    cycles: float | None
    reason: str = ""
    beside: float = 0.0

    @property
    def whole(self) -> float:
        """Cycles of the call and beside it; infinite if those of the call are not known."""
        return float("inf") if self.cycles is None else self.cycles + self.beside


@dataclasses.dataclass(frozen=True)
class StaticChoice:
    """Result of choosing one knob's setting.

    Attributes:
      knob: name of the knob.
      setting: the chosen setting.
      before: the setting that was in force.
      estimates: the estimate of each candidate.
    """

    knob: str
    setting: Setting
    before: Setting
    estimates: tuple[Estimate, ...]

    def of(self, setting: Setting) -> Estimate:
        """Return the estimate of a setting."""
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
    """Choose settings for one case and one chip.

    Kernels of one call are compiled together: with their first candidates, then with their second ones, and so on.

    Args:
      implementation: the implementation.
      tunable: its declaration of knobs, which has a `native` call.
      case: the case to compile.
      target: the chip.
      compiled: compiles a call of the problem, with its gradients if a knob belongs to the backward pass.
      knobs: the knobs to choose. If one chooses among kernels, kernels that are not in `knobs` keep the setting in
        force.
      on_step: called with what happens now, for the progress display.
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
                # What does not compile together may do so alone.
                own = ask({**base, **given, knob.name: setting}) if isinstance(told, str) else told
                found[knob.name].append(_estimate_candidate(knob, setting, own, knob.traffic(case, setting), target))
    choices = {name: _choose_setting(name, estimates) for name, estimates in found.items()}
    choices |= {knob.name: _choose_kernels(knob, base[knob.name], choices) for knob in knobs if knob.ways}
    return [choices[knob.name] for knob in knobs]


def _group_by_call(knobs: Sequence[Knob]) -> list[list[Knob]]:
    """Group kernels that one call compiles together.

    Kernels with the same other settings (`Knob.given`) are a group. Kernels without any join the first group.
    """
    found: dict[str, list[Knob]] = {}
    for knob in sorted(knobs, key=lambda knob: not knob.given):
        found.setdefault(str(knob.given) if knob.given else next(iter(found), ""), []).append(knob)
    return list(found.values())


def _remove_duplicates(settings: Sequence[Setting]) -> list[Setting]:
    """Keep the first of equal settings."""
    return [one for place, one in enumerate(settings) if dict(one) not in [dict(other) for other in settings[:place]]]


def _estimate_candidate(
    knob: Knob, setting: Setting, told: CompileResult, traffic: Traffic, target: CompileTarget
) -> Estimate:
    """Estimate a candidate from the figures of its program, or from the reason why there are none."""
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
    """Choose the first candidate whose cycles do not clearly exceed the fewest; the setting in force comes first."""
    before, least = estimates[0].setting, min(one.whole for one in estimates)
    few = (one.setting for one in estimates if one.cycles is not None and one.whole <= (1 + SCHEDULING_NOISE) * least)
    return StaticChoice(knob, next(few, before), before, tuple(estimates))


def _choose_kernels(knob: Knob, before: Setting, choices: Mapping[str, StaticChoice]) -> StaticChoice:
    """Choose among sets of kernels, each at its chosen setting: the first, unless another is much shorter."""
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
