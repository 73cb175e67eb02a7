"""Locate faults: find the levels, alone or in pairs, that distinguish red rows from green ones.

A row is a case of a covering array. It has many levels, and every pair of levels stands in some row. Which of them a
fault needs follows from which rows fail. Nie and Leung call the smallest such combination the minimal failure-causing
schema ("The minimal failure-causing schema of combinatorial testing", ACM TOSEM 20(4), 2011). Colbourn and McClary
define the arrays from which it can always be determined ("Locating and detecting arrays for interaction faults",
Journal of Combinatorial Optimization 15, 2008). A covering array is not one of them, so combinations that its rows
cannot distinguish are returned together. BEN ranks suspicious combinations (Ghandehari, Lei, Xie, Kuhn and Kacker,
"Identifying failure-inducing combinations in a combinatorial test set", ICST 2012) and confirms them by further tests,
as `conformance.judging.failure_probes.confirmation` does.

Three things differ from these papers. First, a faulty row may pass by chance, since a wrong mask matters little to some
values. So a split of the rows is scored, and need not be clean. The score compares two hypotheses: nearly all rows with
the combination are red and nearly none without it, against one rate of red for all rows. Second, there may be several
faults at once. The best combination explains its red rows, the next explains the rest, and then each is sought again
among what the others leave. Third, a fault shows in several results of a row, the *signals*. They repeat the same
evidence, so the clearest signal counts, and not their sum.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

MAX_COMBINATIONS = 12
"""Combinations that are sought: more faults at once cannot be distinguished."""
_PASSES = 2  # how often each is sought again among what the others leave

# Beta distributions of the rate of red. With a combination, rows are red unless chance hides the fault. Without it,
# rows are green unless another fault, not found yet, makes them red. Each distribution is flat on the expected side and
# steep on the other.
_RATE_WITH, _RATE_WITHOUT, _RATE_OF_ANY = (1.0, 0.5), (0.3, 1.0), (1.0, 1.0)
_MIN_GAIN = 0.5
"""How much likelier, in nats, a combination must make the evidence, less the cost of its complexity."""


@dataclasses.dataclass(frozen=True)
class Signal:
    """The rows where a result is red, and those where it is green, as sets of bits."""

    red: int
    green: int

    def remove(self, rows: int) -> Signal:
        """Return the signal without red rows that something else explains."""
        return Signal(self.red & ~rows, self.green)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A level that may explain red rows.

    Attributes:
      rows: the rows that have it.
      odds: how much less likely than others it is to matter, in nats.
    """

    rows: int
    odds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Combination:
    """A combination of levels.

    Attributes:
      levels: their numbers; no level stands for every row.
      rows: the rows that have them all.
      others: other combinations with the same rows.
    """

    levels: tuple[int, ...]
    rows: int
    others: tuple[tuple[int, ...], ...] = ()


def locate(
    levels: Sequence[Candidate], signals: Mapping[str, Signal], found: Sequence[Combination] = ()
) -> list[Combination]:
    """Find the fewest combinations that explain the red rows of all signals.

    Args:
      levels: those that a row may have.
      signals: by name, those first in which a fault shows most plainly.
      found: combinations that explain red rows already.
    """
    chosen: list[Combination] = []
    while (
        len(chosen) < MAX_COMBINATIONS
        and (best := _find_best(levels, remove_explained([*found, *chosen], signals))) is not None
    ):
        if any(best.rows == one.rows for one in chosen):
            break
        chosen.append(best)
    for _ in range(_PASSES):
        before = list(chosen)
        for place in range(len(chosen)):
            others = [*found, *chosen[:place], *chosen[place + 1 :]]
            again = _find_best(levels, remove_explained(others, signals))
            if again is not None and all(again.rows != other.rows for other in others):
                chosen[place] = again
        if chosen == before:
            break
    return [
        one for one in chosen if any(explains(one, left) for left in _iter_unexplained(signals, found, chosen, one))
    ]


def explains(combination: Combination, signal: Signal) -> bool:
    """Return whether a signal is red as the combination would make it."""
    return _compute_gain(combination.rows, signal) > 0 and bool(combination.rows & signal.red)


def find_clearest_signal(combination: Combination, signals: Mapping[str, Signal]) -> str:
    """Find the signal that shows a combination best.

    It is the first of those that gain nearly as much as any.
    """
    gains = {name: _compute_gain(combination.rows, signal) for name, signal in signals.items()}
    most = max(gains.values())  # below zero where no signal is as the combination would make it
    return next(name for name, gain in gains.items() if gain >= min(most, most / 2))


def add_indistinguishable(levels: Sequence[Candidate], one: Combination, signal: Signal) -> Combination:
    """Add the combinations that a signal cannot distinguish from this one: each replaces one level by another.

    Results of more cases do not help where this signal was not judged. A level is no alternative if all cases have it
    where the signal was judged, as gradients are judged in training only.
    """
    asked = signal.red | signal.green
    others = list(one.others)
    for place, number in enumerate(one.levels):
        rest = [levels[n].rows for n in one.levels if n != number]
        for instead, level in enumerate(levels):
            rows = functools.reduce(lambda rows, more: rows & more, rest, level.rows)
            numbers = tuple(sorted((*one.levels[:place], instead, *one.levels[place + 1 :])))
            same = rows & asked == one.rows & asked and level.rows & asked != asked
            same = same and level.odds <= levels[number].odds
            if same and len(set(numbers)) == len(one.levels) and numbers not in (*others, tuple(sorted(one.levels))):
                others.append(numbers)
    return dataclasses.replace(one, others=tuple(others))


def _iter_unexplained(
    signals: Mapping[str, Signal], found: Sequence[Combination], chosen: Sequence[Combination], one: Combination
) -> Iterator[Signal]:
    others = [*found, *(other for other in chosen if other is not one)]
    yield from remove_explained(others, signals).values()


def remove_explained(found: Sequence[Combination], signals: Mapping[str, Signal]) -> dict[str, Signal]:
    """Remove the red rows of each signal that some of these combinations explain."""
    left = dict(signals)
    for combination in found:
        left = {name: s.remove(combination.rows) if explains(combination, s) else s for name, s in left.items()}
    return left


def _find_best(levels: Sequence[Candidate], signals: Mapping[str, Signal]) -> Combination | None:
    """Find the combination that gains most after its cost; none if no combination explains anything."""
    red_signals = [signal for signal in signals.values() if signal.red]
    if not red_signals:
        return None
    seen = functools.reduce(lambda rows, signal: rows | signal.red | signal.green, red_signals, 0)
    cost = math.log(max(2, len(levels)))
    best: tuple[float, float] | None = None
    by_rows: dict[int, list[tuple[float, tuple[int, ...]]]] = {}
    winner = 0
    for price, numbers, rows in _iter_combinations(levels, seen, cost, _join_red(red_signals)):
        tied = by_rows.setdefault(rows, [])
        tied.append((price, numbers))
        if len(tied) > 1 and price >= min(other for other, _ in tied[:-1]):
            continue  # a cheaper combination with the same rows was scored
        gains = [_compute_gain(rows, signal) for signal in red_signals]
        worth = (max(gains) - price, math.fsum(gains))
        if worth[0] > _MIN_GAIN and (best is None or worth > best):
            best, winner = worth, rows
    if best is None:
        return None
    tied = sorted(by_rows[winner])
    least = [numbers for _, numbers in tied if len(numbers) == len(tied[0][1])]
    everywhere = functools.reduce(lambda rows, level: rows | level.rows, levels, seen)
    rows = functools.reduce(lambda rows, number: rows & levels[number].rows, least[0], everywhere)
    return Combination(least[0], rows, tuple(least[1:]))


def _join_red(signals: Sequence[Signal]) -> int:
    return functools.reduce(lambda rows, signal: rows | signal.red, signals, 0)


def _iter_combinations(
    levels: Sequence[Candidate], seen: int, cost: float, red: int
) -> Iterator[tuple[float, tuple[int, ...], int]]:
    """Yield the cost, levels and rows of each combination.

    A combination has no level, one, or two whose common rows neither has alone.
    """
    yield 0.0, (), seen
    single = [(cost + level.odds, number, level.rows & seen) for number, level in enumerate(levels)]
    single = [one for one in single if one[2] & red]
    for price, number, rows in single:
        yield price, (number,), rows
    for (price, one, rows), (other_price, other, other_rows) in itertools.combinations(single, 2):
        both = rows & other_rows
        if both not in (rows, other_rows) and both & red:
            yield price + other_price, (one, other), both


def _compute_gain(rows: int, signal: Signal) -> float:
    """Compute the gain of explaining a signal by these rows, in nats.

    It is the log likelihood of the signal if the rows decide it, less that if nothing does.
    """
    red, green = (rows & signal.red).bit_count(), (rows & signal.green).bit_count()
    other_red, other_green = signal.red.bit_count() - red, signal.green.bit_count() - green
    if red * other_green < other_red * green:  # red is more frequent without
        return -math.inf
    return _compute_gain_of_counts(red, green, other_red, other_green)


@functools.lru_cache(maxsize=1 << 16)
def _compute_gain_of_counts(red: int, green: int, other_red: int, other_green: int) -> float:
    split = _compute_evidence(red, green, *_RATE_WITH) + _compute_evidence(other_red, other_green, *_RATE_WITHOUT)
    return split - _compute_evidence(red + other_red, green + other_green, *_RATE_OF_ANY)


@functools.lru_cache(maxsize=1 << 16)
def _compute_evidence(red: int, green: int, a: float, b: float) -> float:
    """Compute the log likelihood of so many red and green rows, in one order.

    Their rate of red is beta-distributed with the parameters `a` and `b`.
    """
    return _compute_log_beta(red + a, green + b) - _compute_log_beta(a, b)


def _compute_log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
