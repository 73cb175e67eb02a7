"""Time several functions alternately, in rounds A B C, A B C, so that a drift of the machine affects all of them alike.

Two functions are compared round by round (`compare_pairs`). If the machine slows down for a second, or its clock rises,
both times of a round change, and their ratio stays. The functions and the clock are arguments, so this module does not
depend on JAX. `interleaved_timing` uses it to time kernels.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence

from reports.records.measurement import Quartiles

MIN_ROUNDS = 3
"""Number of rounds that run even if the time limit is exceeded.

If an interruption leaves fewer rounds, the samples are dropped.
"""
WARM_UP_ROUNDS, WARM_UP_SECONDS = 3, 1.0
"""Largest number of warm-up rounds, and the seconds after which no further one starts. The first one always runs."""
MAX_CALLS = 1000
"""Largest number of successive calls in one sample."""

RunCalls = Callable[[int], None]
"""A function that takes a number of calls, makes them in succession, and returns when the last call is finished."""


@dataclasses.dataclass(frozen=True)
class Samples:
    """Result of timing functions alternately."""

    # By name of a function, its mean seconds per call in each round; only functions that ran in every round.
    seconds: Mapping[str, tuple[float, ...]]
    calls: Mapping[str, int]  # by name of a function, the number of calls in each of its samples
    failures: Mapping[str, Exception]
    interrupted: bool


def interleave(
    functions: Mapping[str, RunCalls],
    *,
    rounds: int,
    seconds: float = math.inf,
    least: float = 0.0,
    warm_up: float = WARM_UP_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
    on_round: Callable[[int], None] = lambda done: None,
) -> Samples:
    """Warm up each function, then time all functions alternately, in the given order.

    Args:
      functions: the functions by name. A function that raises is left out of later rounds.
      rounds: number of rounds; each function is timed once in a round.
      seconds: number of seconds, warm-up included, after which no further round starts. `MIN_ROUNDS` rounds always run.
      least: least duration of a sample in seconds. Dispatch or the resolution of the clock would dominate a shorter
        sample. So a sample consists of as many successive calls as this duration takes.
      warm_up: number of seconds after which no further round of warming up starts.
    """
    running = dict(functions)
    failures: dict[str, Exception] = {}
    found: dict[str, list[float]] = {name: [] for name in functions}
    calls: dict[str, int] = {}
    started = clock()
    done, interrupted = 0, False

    def timed(name: str, count: int) -> float | None:
        begun = clock()
        try:
            running[name](count)
        except Exception as error:  # one function's failure must not end the others
            failures[name] = error
            del running[name]
            return None
        return (clock() - begun) / count

    try:
        fastest = dict.fromkeys(functions, math.inf)
        for warmed in range(WARM_UP_ROUNDS):
            if warmed and clock() - started >= warm_up:
                break
            for name in list(running):
                if (took := timed(name, 1)) is not None:
                    fastest[name] = min(fastest[name], took)
        calls = {name: count_calls(least, fastest[name]) for name in running}
        while running and done < rounds and (done < MIN_ROUNDS or clock() - started < seconds):
            for name in list(running):
                if (took := timed(name, calls[name])) is not None:
                    found[name].append(took)
            done += 1
            on_round(done)
    except KeyboardInterrupt:
        interrupted = True
    whole = {name: tuple(found[name][:done]) for name in running}
    kept = {name: samples for name, samples in whole.items() if len(samples) >= min(MIN_ROUNDS, rounds)}
    return Samples(kept, {name: calls[name] for name in kept}, failures, interrupted)


def count_calls(least: float, fastest: float) -> int:
    """Compute how many calls of `fastest` seconds each last at least `least` seconds; at most `MAX_CALLS`."""
    if fastest <= 0:
        return MAX_CALLS if least > 0 else 1
    return min(MAX_CALLS, max(1, math.ceil(least / fastest)))


def compare_pairs(baseline: Sequence[float], other: Sequence[float]) -> Quartiles:
    """Compute the quartiles of `baseline / other` over rounds, given in seconds; at 2, `other` is twice as fast."""
    return Quartiles.of([a / b for a, b in zip(baseline, other, strict=True)])
