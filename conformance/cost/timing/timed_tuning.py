"""Choosing an implementation's settings by timing them: one knob after the other, the candidates side by side.

Candidates take turns with the setting in force. After each stage the slower half drops out and the rest run twice as
many rounds (successive halving: Jamieson & Talwalkar 2016, arXiv:1502.07943), until a few are left to be timed at
length. The fastest of these replaces the setting in force, but only if it is faster by more than the spread of the
comparison. A candidate that does not compile, does not fit, or gives a wrong result is shown and never chosen.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from cases.case import Case
from conformance.contract import Implementation
from conformance.cost.timing.interleaved_timing import (
    DrawnCase,
    Entrant,
    TimingLimits,
    forget_programs,
    prepare_entrant,
    time_entrants,
)
from conformance.cost.timing.sampling import MIN_ROUNDS
from conformance.cost.timing.timed_programs import compile_program
from conformance.measurements import Measurement
from conformance.truth.tolerances import Tolerances
from conformance.tunable import Knob, KnobSettings, Setting, Tunable


@dataclasses.dataclass(frozen=True)
class KnobChoice:
    """What tuning one knob gave: the setting now, the one before, and every candidate's measurement."""

    knob: str
    setting: Setting
    before: Setting
    measurements: list[Measurement]

    @property
    def changed(self) -> bool:
        """Whether another setting than the one in force was chosen."""
        return dict(self.setting) != dict(self.before)


@dataclasses.dataclass(frozen=True)
class TuningResult:
    """What tuning on one case gave; `interrupted` if Ctrl-C left knobs as they were."""

    case: Case
    settings: KnobSettings
    choices: tuple[KnobChoice, ...]
    interrupted: bool = False


def tune_by_time(
    implementation: Implementation,
    tunable: Tunable,
    case: Case,
    limits: TimingLimits,
    tolerances: Tolerances,
    *,
    knobs: Sequence[Knob],
    on_step: Callable[[str], None] = lambda text: None,
    on_choice: Callable[[KnobChoice], None] = lambda choice: None,
) -> TuningResult:
    """Tune `knobs` on one case.

    Args:
      implementation: whose knobs.
      tunable: its declaration.
      case: what it is timed on.
      limits: most rounds of the last comparison of each knob, and most seconds of timing over all knobs.
      tolerances: of the look at each candidate's results.
      knobs: which, in order; those with nothing to try for the case stay as they are.
      on_step: told what happens now.
      on_choice: told what each knob gave.
    """
    settings = dict(tunable.settings(case))
    choices: list[KnobChoice] = []
    left = limits.seconds
    try:
        on_step(f"drawing the operands of {case.id}")
        drawn = DrawnCase.of(case, tolerances)
        asked = [(knob, tried) for knob in knobs if (tried := tuple(knob.candidates(case)))]
        for position, (knob, tried) in enumerate(asked):
            share = dataclasses.replace(limits, seconds=left / (len(asked) - position))
            started = time.perf_counter()
            choice = _tune_knob(implementation, tunable, settings, knob, tried, drawn, share, on_step)
            left = max(0.0, left - (time.perf_counter() - started))
            settings[knob.name] = choice.setting
            choices.append(choice)
            on_choice(choice)
    except KeyboardInterrupt:
        return TuningResult(case, settings, tuple(choices), interrupted=True)
    return TuningResult(case, settings, tuple(choices))


def _tune_knob(
    implementation: Implementation,
    tunable: Tunable,
    settings: KnobSettings,
    knob: Knob,
    tried: Sequence[Setting],
    drawn: DrawnCase,
    limits: TimingLimits,
    on_step: Callable[[str], None],
) -> KnobChoice:
    """Tune one knob: what is in force, and what is `tried`; the others as in `settings`."""
    before = settings[knob.name]
    candidates = {
        f"{implementation.name} {format_setting(knob.name, setting)}": setting for setting in (before, *tried)
    }
    variants = {
        name: dataclasses.replace(
            implementation, name=name, call=tunable.call({**settings, **knob.given, knob.name: setting})
        )
        for name, setting in candidates.items()
    }
    entrants: dict[str, Entrant] = {}
    found: dict[str, Measurement] = {}
    for name, entered in _iter_entrants(variants, drawn, knob.phase, on_step):
        if isinstance(entered, Measurement):
            found[name] = entered
        elif not entered.finding.agrees:
            found |= _time_candidates({name: entered}, drawn, knob.phase, 1, limits.seconds, on_step)
        else:
            entrants[name] = entered
    current = next(iter(candidates))
    chosen, timed = halve_candidates(
        list(entrants),
        current,
        lambda names, rounds, seconds: _time_candidates(
            {name: entrants[name] for name in names}, drawn, knob.phase, rounds, seconds, on_step
        ),
        limits,
    )
    entrants.clear()
    forget_programs()
    rows = found | timed
    return KnobChoice(knob.name, candidates[chosen], before, [rows[name] for name in candidates if name in rows])


def _iter_entrants(
    variants: Mapping[str, Implementation], drawn: DrawnCase, phase: str, on_step: Callable[[str], None]
) -> Iterator[tuple[str, Entrant | Measurement]]:
    """Each candidate, compiled and looked at. Compiling takes most of the time, and is done on every core."""
    cores = ThreadPoolExecutor(os.cpu_count())
    try:
        programs = {
            name: cores.submit(compile_program, variant, drawn.problem, drawn.cotangent, phase)
            for name, variant in variants.items()
        }
        for position, (name, variant) in enumerate(variants.items(), 1):
            on_step(f"compiling {name}, {position} of {len(variants)}")
            yield name, prepare_entrant(variant, drawn, phase, programs[name].result)
    finally:
        cores.shutdown(cancel_futures=True)  # what compiles is not cut in two


FINALISTS = 3
"""Candidates that are timed at length: with one, a moment's noise would decide."""

TimeCandidates = Callable[[Sequence[str], int, float], Mapping[str, Measurement]]
"""Times some candidates for so many rounds and at most so many seconds, the first being the baseline."""


def halve_candidates(
    names: Sequence[str], current: str, times: TimeCandidates, limits: TimingLimits
) -> tuple[str, dict[str, Measurement]]:
    """The candidate to take, and the last measurement of each (module docstring).

    `current`, if it is among `names`, takes part in every stage as the baseline.
    """
    found: dict[str, Measurement] = {}
    alive = [name for name in names if name != current]
    held = [name for name in names if name == current]
    rounds, seconds = MIN_ROUNDS, limits.seconds / 2
    while len(alive) > FINALISTS:
        found |= times([*held, *alive], rounds, seconds)
        alive = _rank_by_time(alive, found)[: max(FINALISTS, len(alive) // 2)]
        rounds, seconds = min(2 * rounds, limits.rounds), seconds / 2
    if not alive:
        return current, found
    found |= times([*held, *alive], limits.rounds, limits.seconds / 2)
    faster = [name for name in _rank_by_time(alive, found) if not held or _is_faster(found[name])]
    return (faster[0] if faster else current), found


def _rank_by_time(names: Sequence[str], found: Mapping[str, Measurement]) -> list[str]:
    """Those that were timed, the least median first."""
    medians = {name: seconds.median for name in names if (seconds := found[name].seconds) is not None}
    return sorted(medians, key=lambda name: medians[name])


def _is_faster(measurement: Measurement) -> bool:
    return measurement.speed is not None and measurement.speed.lower > 1


def format_setting(knob: str, setting: Setting) -> str:
    """How a candidate is named."""
    return f"{knob} {' '.join(f'{name}={value}' for name, value in setting.items())}"


def _time_candidates(
    entrants: Mapping[str, Entrant],
    drawn: DrawnCase,
    phase: str,
    rounds: int,
    seconds: float,
    on_step: Callable[[str], None],
) -> dict[str, Measurement]:
    """Time some candidates side by side."""
    found, interrupted = time_entrants(
        entrants,
        drawn,
        phase,
        TimingLimits(rounds=rounds, seconds=seconds),
        on_round=lambda done: on_step(f"{len(entrants)} candidates, round {done} of {rounds}"),
    )
    if interrupted:
        raise KeyboardInterrupt
    return {row.implementation: row for row in found}
