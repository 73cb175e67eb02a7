"""Sampling several functions side by side: A B C, A B C, so that whatever drifts hits all of them alike.

What is compared is compared round by round (`paired`): a machine that slows down for a second, or a clock that is
raised, changes both members of a pair. Nothing here knows what the functions do or which clock is read.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence

from conformance.measurements import Quartiles

MIN_ROUNDS = 3
"""Rounds that are run whatever the time limit says, and below which an interrupted sample counts for nothing."""
WARM_UP_ROUNDS, WARM_UP_SECONDS = 3, 1.0
"""Each function runs at least once beforehand; slow ones need no more, since there is little to warm up in them."""
MAX_CALLS = 1000

RunCalls = Callable[[int], None]
"""Makes that many calls in a row and returns when the last is done."""


@dataclasses.dataclass(frozen=True)
class Samples:
    """What sampling gave.

    Attributes:
      seconds: by function, the mean seconds a call of each round; only functions that ran in every round.
      calls: by function, the calls of each sample.
      failures: by function, what it raised.
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
    """Time functions in turn, in the order given, after warming each up.

    Args:
      functions: what to time, by name. One that raises is left out from then on.
      rounds: how often each is timed.
      seconds: begin no further round after this long, warm-up included, once there are `FEWEST_ROUNDS`.
      least: a sample shorter than this is too short for the clock, or for what a call's dispatch costs: as many calls
        in a row as it takes make one sample.
      warm_up: begin no further round of warming up after this many seconds.
      clock: seconds, from any start.
      on_round: told how many rounds are done.
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
        except Exception as error:  # whatever it raises is its own failure, not the end of the others
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
    """Calls in a row that last at least `least` seconds, if one takes `fastest`; at most `MOST_CALLS`."""
    if fastest <= 0:
        return MAX_CALLS if least > 0 else 1
    return min(MAX_CALLS, max(1, math.ceil(least / fastest)))


def compare_pairs(baseline: Sequence[float], other: Sequence[float]) -> Quartiles:
    """Quartiles of `baseline / other`, round by round: how many times as fast as the baseline the other is."""
    return Quartiles.of([a / b for a, b in zip(baseline, other, strict=True)])
