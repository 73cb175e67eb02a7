"""Choosing an implementation's settings without its accelerator: by the cycles that its compiler's schedules come to.

Every candidate is compiled, and the call of its kernel counted (`conformance.accelerators.tpu_cost`). That is
deterministic, and was never checked on a chip. The first candidate is taken that needs not clearly more cycles than
the one with the fewest: the setting in force comes before all, and then they come as the implementation names them. One
that does not compile, or of whose call the cycles are not known, is shown and never chosen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from cases.case import Case
from cases.inputs import draw
from conformance.accelerators import compilation
from conformance.accelerators.targets import CompileTarget
from conformance.bench.tuning import label
from conformance.calling.execution import Executor
from conformance.contract import Implementation
from conformance.tunable import Knob, KnobSettings, Setting, Tunable

CLEARLY = 0.03
"""By which part cycles differ and say nothing: so much the scheduling itself wavers."""

Told = Mapping[str, float] | str
"""What compiling gave: figures, or why there are none."""
Compile = Callable[[Executor, object, CompileTarget], Told]


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A candidate: cycles of the call of its kernel, or why there are none."""

    setting: Setting
    cycles: float | None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class StaticChoice:
    """What one knob gave: the setting now, the one before, and every candidate."""

    knob: str
    setting: Setting
    before: Setting
    estimates: tuple[Estimate, ...]

    def cycles(self, setting: Setting) -> float | None:
        """Of a candidate."""
        return next(one.cycles for one in self.estimates if dict(one.setting) == dict(setting))


def tune(
    implementation: Implementation,
    tunable: Tunable,
    case: Case,
    target: CompileTarget,
    compiled: Compile,
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
      knobs: which; all are compiled with their first candidates, then with their second ones, and so on.
      on_step: told what happens now.
    """
    native = tunable.native
    assert native is not None
    with compilation.for_chip(target):
        base = {name: dict(setting) for name, setting in tunable.settings(case).items()}
    tried = {knob.name: _different([base[knob.name], *knob.candidates(case)]) for knob in knobs}
    problem, known = draw(case), dict[str, Told]()

    def ask(settings: KnobSettings) -> Told:
        name = ", ".join(label(knob, settings[knob]) for knob in settings)
        if name not in known:
            on_step(f"compiling {target.name}: {name}")
            accelerator = dataclasses.replace(implementation.accelerator, native=native(settings))
            variant = dataclasses.replace(implementation, accelerator=accelerator)
            known[name] = compiled(Executor(variant), problem, target)
        return known[name]

    found: dict[str, list[Estimate]] = {knob.name: [] for knob in knobs}
    for turn in range(max(map(len, tried.values()), default=0)):
        asked = [(knob, tried[knob.name][turn]) for knob in knobs if turn < len(tried[knob.name])]
        together = ask(base | {knob.name: setting for knob, setting in asked})
        for knob, setting in asked:
            # What does not compile together may do so alone.
            told = ask(base | {knob.name: setting}) if isinstance(together, str) else together
            found[knob.name].append(_estimate(knob, setting, told))
    return [_chosen(knob.name, found[knob.name]) for knob in knobs]


def _different(settings: Sequence[Setting]) -> list[Setting]:
    return [one for place, one in enumerate(settings) if dict(one) not in [dict(other) for other in settings[:place]]]


def _estimate(knob: Knob, setting: Setting, told: Told) -> Estimate:
    if isinstance(told, str):
        return Estimate(setting, None, told)
    ends = f"{knob.kernel}.call_cycles"
    cycles = next((value for name, value in told.items() if name.endswith(ends)), None)
    return Estimate(setting, cycles, "" if cycles is not None else "the cycles of its call are not known")


def _chosen(knob: str, estimates: Sequence[Estimate]) -> StaticChoice:
    """Of the candidates that take the fewest cycles, or not clearly more, the first: what is in force, if it is one."""
    before, known = estimates[0].setting, [one.cycles for one in estimates if one.cycles is not None]
    within = (1 + CLEARLY) * min(known, default=0.0)
    few = (one.setting for one in estimates if one.cycles is not None and one.cycles <= within)
    return StaticChoice(knob, next(few, before), before, tuple(estimates))
