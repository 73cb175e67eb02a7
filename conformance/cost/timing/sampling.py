"""Time several functions in turn, A B C, A B C, so that a drift of the machine affects all of them alike.

Functions are compared round by round (`compare_pairs`). If the machine slows down for a second, or its clock rises,
both members of a pair change. This module knows neither what the functions do nor which clock is read.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence

from conformance.measurements import Quartiles

MIN_ROUNDS = 3
"""Rounds that run whatever the time limit; if an interruption leaves fewer, the samples do not count."""
WARM_UP_ROUNDS, WARM_UP_SECONDS = 3, 1.0
"""Limits of warming up. Each function runs at least once; slow functions need no more."""
MAX_CALLS = 1000

RunCalls = Callable[[int], None]
"""A function that makes this many successive calls, and returns when the last is done."""


@dataclasses.dataclass(frozen=True)
class Samples:
    """Result of timing functions in turn.

    Attributes:
      seconds: by function, the mean seconds per call in each round; only functions that ran in every round.
      calls: by function, the number of calls of each sample.
      failures: by function, the exception that it raised.
      interrupted: whether Ctrl-C ended it.
    """

    seconds: Mapping[str, tuple[float, ...]]
    calls: Mapping[str, int]
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
    """Time functions in turn, in the given order, after warming up each of them.

    Args:
      functions: the functions by name. One that raises is left out from then on.
      rounds: how often each is timed.
      seconds: start no round after this time, warm-up included, once there are `MIN_ROUNDS`.
      least: least seconds of a sample. Dispatch or the clock would dominate a shorter one, so a sample consists of as
        many successive calls as it takes.
      warm_up: start no round of warming up after this many seconds.
      clock: returns seconds from any start.
      on_round: called with the number of rounds that are done.
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
    """Count the successive calls that last at least `least` seconds if one takes `fastest`; at most `MAX_CALLS`."""
    if fastest <= 0:
        return MAX_CALLS if least > 0 else 1
    return min(MAX_CALLS, max(1, math.ceil(least / fastest)))


def compare_pairs(baseline: Sequence[float], other: Sequence[float]) -> Quartiles:
    """Compute quartiles of `baseline / other`, round by round: how many times as fast as the baseline the other is."""
    return Quartiles.of([a / b for a, b in zip(baseline, other, strict=True)])
