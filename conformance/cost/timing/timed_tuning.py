"""Choose an implementation's settings (block sizes and the like) by timing them on this machine.

A *knob* is one independent setting, and its *candidates* are the settings to try (`impls.contract.tunable`). Knobs are
tuned one after the other. The command `tune` writes the chosen settings to the implementation's table.

The candidates of a knob and the setting in force are timed alternately. After each stage the slower half is dropped,
and the other candidates run twice as many rounds (successive halving: Jamieson & Talwalkar 2016, arXiv:1502.07943). The
last few candidates are timed for longer. The fastest of them replaces the setting in force only if it is faster in more
than three quarters of the rounds. A candidate that does not compile, does not fit, or gives a wrong result is shown and
never chosen.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from cases.case import Case
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
from conformance.truth.tolerances import Tolerances
from impls.contract.implementation import Implementation
from impls.contract.tunable import Knob, KnobSettings, Setting, Tunable
from reports.records.measurement import Measurement


@dataclasses.dataclass(frozen=True)
class KnobChoice:
    """Result of tuning one knob.

    Attributes:
      knob: name of the knob.
      setting: the chosen setting.
      before: the setting that was in force before tuning.
      measurements: the measurement of each candidate, including the setting that was in force.
    """

    knob: str
    setting: Setting
    before: Setting
    measurements: list[Measurement]

    @property
    def changed(self) -> bool:
        """Whether the chosen setting differs from the one that was in force."""
        return dict(self.setting) != dict(self.before)


@dataclasses.dataclass(frozen=True)
class TuningResult:
    """Settings by knob after tuning on one case, each choice, and whether Ctrl-C left some knobs untuned."""

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
    """Tune `knobs` one after the other on one case.

    Args:
      limits: largest number of rounds of each knob's last stage, and of seconds of timing over all knobs.
      knobs: the knobs to tune, in order. A knob without candidates for the case keeps its setting.
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
    """Tune one knob: compare the setting in force with the settings in `tried`; `settings` has those of other knobs."""
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
    """Compile, in parallel, and check each candidate, and yield it by name, or a measurement if it fails."""
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
        cores.shutdown(cancel_futures=True)  # waits for compilations that have started, and drops the others


FINALISTS = 3
"""Number of candidates in the last stage, which is timed for longer.

If only one candidate were left, the noise of an earlier stage would decide.
"""

TimeCandidates = Callable[[Sequence[str], int, float], Mapping[str, Measurement]]
"""A function of (names of candidates, number of rounds, most seconds) that times them; the first is the baseline."""


def halve_candidates(
    names: Sequence[str], current: str, times: TimeCandidates, limits: TimingLimits
) -> tuple[str, dict[str, Measurement]]:
    """Choose a candidate by successive halving; also return the last measurement of each candidate.

    Args:
      names: names of the candidates that can be timed.
      current: name of the setting in force. If it is in `names`, it is the baseline in every stage.
      limits: largest number of rounds of the last stage, and of seconds over all stages.
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
    # Faster than the baseline in more than three quarters of the rounds.
    speeds = {name: found[name].speed for name in _rank_by_time(alive, found)}
    faster = [name for name, speed in speeds.items() if not held or (speed is not None and speed.lower > 1)]
    return (faster[0] if faster else current), found


def _rank_by_time(names: Sequence[str], found: Mapping[str, Measurement]) -> list[str]:
    """Sort the candidates by their median seconds, the fastest first; candidates without a time are left out."""
    medians = {name: seconds.median for name in names if (seconds := found[name].seconds) is not None}
    return sorted(medians, key=lambda name: medians[name])


def format_setting(knob: str, setting: Setting) -> str:
    """Format a candidate's name from the name of its knob and its setting: `forward block_q=128 block_kv=64`."""
    return f"{knob} {' '.join(f'{name}={value}' for name, value in setting.items())}"


def _time_candidates(
    entrants: Mapping[str, Entrant],
    drawn: DrawnCase,
    phase: str,
    rounds: int,
    seconds: float,
    on_step: Callable[[str], None],
) -> dict[str, Measurement]:
    """Time candidates side by side, and return their measurements by name; raise `KeyboardInterrupt` on Ctrl-C."""
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
