"""Choosing an implementation's settings without its accelerator: by the cycles that its compiler's schedules come to.

Every candidate is compiled, and the call of its kernel counted (`conformance.cost.tpu.tpu_figures`). That is
deterministic, and was never checked on a chip. The first candidate is taken that needs not clearly more cycles than
the one with the fewest: the setting in force comes before all, and then they come as the implementation names them. One
that does not compile, or of whose call the cycles are not known, is shown and never chosen.

To the cycles of a call comes the time in which HBM gives and takes what else crosses for its kernel (`Knob.traffic`),
and a call is never shorter than all that crosses in it. Where several kernels give the same results, the first way is
taken unless another is shorter by more than `FAR`: these sums say less than two schedules of one kernel do.
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
"""By which part cycles differ and say nothing: so much the scheduling itself wavers."""
MIN_SAVING = 0.05
"""By which part one way must be shorter than another."""

CompileResult = Mapping[str, float] | str
"""What compiling gave: figures, or why there are none."""
CompileCall = Callable[[Executor, object, CompileTarget], CompileResult]


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A candidate: cycles of the call of its kernel, or why there are none; and of what is done beside it."""

    setting: Setting
    cycles: float | None
    reason: str = ""
    beside: float = 0.0

    @property
    def whole(self) -> float:
        """Cycles of both, infinite where those of the call are not known."""
        return float("inf") if self.cycles is None else self.cycles + self.beside


@dataclasses.dataclass(frozen=True)
class StaticChoice:
    """What one knob gave: the setting now, the one before, and every candidate."""

    knob: str
    setting: Setting
    before: Setting
    estimates: tuple[Estimate, ...]

    def of(self, setting: Setting) -> Estimate:
        """Of a candidate."""
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
    """Choose for one case and generation.

    Args:
      implementation: whose settings.
      tunable: its declaration, which has a `native` call.
      case: what is compiled.
      target: for which generation.
      compiled: compiles a call of the problem, with its gradients if a knob is of the backward pass.
      knobs: which; kernels that one call has are compiled with their first candidates, then with their second ones, and
        so on. Of a knob that chooses among kernels, those that are not asked for have the setting in force.
      on_step: told what happens now.
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
    """Kernels by what else is set for them; one for which nothing is goes with the first of them."""
    found: dict[str, list[Knob]] = {}
    for knob in sorted(knobs, key=lambda knob: not knob.given):
        found.setdefault(str(knob.given) if knob.given else next(iter(found), ""), []).append(knob)
    return list(found.values())


def _remove_duplicates(settings: Sequence[Setting]) -> list[Setting]:
    return [one for place, one in enumerate(settings) if dict(one) not in [dict(other) for other in settings[:place]]]


def _estimate_candidate(
    knob: Knob, setting: Setting, told: CompileResult, traffic: Traffic, target: CompileTarget
) -> Estimate:
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
    """Of the candidates that take the fewest cycles, or not clearly more, the first: what is in force, if it is one."""
    before, least = estimates[0].setting, min(one.whole for one in estimates)
    few = (one.setting for one in estimates if one.cycles is not None and one.whole <= (1 + SCHEDULING_NOISE) * least)
    return StaticChoice(knob, next(few, before), before, tuple(estimates))


def _choose_kernels(knob: Knob, before: Setting, choices: Mapping[str, StaticChoice]) -> StaticChoice:
    """Of several sets of kernels, each at its choice, the first unless another is far shorter."""
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
