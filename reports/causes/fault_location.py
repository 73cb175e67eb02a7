"""Locate faults: find the levels, alone or in pairs, that distinguish failing (red) rows from passing (green) ones.

A row is a case of a covering array. It has many levels (`case_levels`), and every pair of levels occurs in some row. A
fault makes a row fail only if the row has certain levels, so the failing rows show which levels these are.

Nie and Leung call the smallest such combination of levels the minimal failure-causing schema ("The minimal
failure-causing schema of combinatorial testing", ACM TOSEM 20(4), 2011). Colbourn and McClary define the arrays from
which it can always be determined ("Locating and detecting arrays for interaction faults", Journal of Combinatorial
Optimization 15, 2008). A covering array is no such array, so combinations that its rows cannot distinguish are returned
together. The tool BEN ranks suspicious combinations (Ghandehari, Lei, Xie, Kuhn and Kacker, "Identifying
failure-inducing combinations in a combinatorial test set", ICST 2012). It confirms them by further tests, as
`conformance.follow_up.confirmation` does.

This module differs from these papers in three ways. First, a row with a fault may pass by chance: with some values, a
wrong mask hardly changes results. So a combination need not separate red from green rows perfectly, and gets a score.
The score is a log likelihood ratio of two hypotheses. Under one, nearly all rows with the combination are red, and
nearly none without it. Under the other, all rows have the same rate of red. Second, there may be several faults at
once. The best combination explains its red rows, and the next combination explains the rest. Then each is searched for
again in the red rows that the others leave. Third, a fault shows in several results of a row, which are called
*signals*. Signals repeat the same evidence, so the score of the clearest signal counts, not the sum.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

MAX_COMBINATIONS = 12
"""The most combinations to search for; more faults at once cannot be distinguished."""
# How many times each combination is searched for again, in the failing (red) rows that no other combination explains.
_PASSES = 2

# Parameters of beta priors of the rate of red rows. With a combination, rows are red unless chance hides the fault.
# Without it, rows are green unless another fault, not found yet, makes them red. The third prior is for all rows, under
# the hypothesis that the combination does not matter.
_RATE_WITH, _RATE_WITHOUT, _RATE_OF_ANY = (1.0, 0.5), (0.3, 1.0), (1.0, 1.0)
_MIN_GAIN = 0.5
"""The smallest score, in nats, of a combination that is accepted: the gain in log likelihood minus the cost."""


@dataclasses.dataclass(frozen=True)
class Signal:
    """The rows where one result is red, and the rows where it is green; each number is a bit mask of rows."""

    red: int
    green: int

    def remove(self, rows: int) -> Signal:
        """Return the signal without the red rows in `rows`, which something else explains."""
        return Signal(self.red & ~rows, self.green)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A level that may explain red rows: `rows` is the bit mask of rows that have the level, `odds` a prior penalty."""

    rows: int
    odds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Combination:
    """A combination of levels."""

    levels: tuple[int, ...]  # the indices of the levels; an empty tuple means every row
    rows: int  # the rows that have all the levels, as a bit mask
    # The levels of other combinations with the same rows, which no row distinguishes from this one.
    others: tuple[tuple[int, ...], ...] = ()


def locate(
    levels: Sequence[Candidate], signals: Mapping[str, Signal], found: Sequence[Combination] = ()
) -> list[Combination]:
    """Find few combinations of levels that together explain the red rows of all signals.

    Args:
      signals: the signals by name; those in which a fault shows most plainly come first.
      found: combinations that were found before; the red rows that they explain need no other explanation.
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
    """Return whether a combination explains a signal: red rows are more likely with the combination than without."""
    return _compute_gain(combination.rows, signal) > 0 and bool(combination.rows & signal.red)


def find_clearest_signal(combination: Combination, signals: Mapping[str, Signal]) -> str:
    """Find the name of the first signal whose gain from a combination is at least half the largest gain."""
    gains = {name: _compute_gain(combination.rows, signal) for name, signal in signals.items()}
    most = max(gains.values())  # negative if the combination explains no signal
    return next(name for name, gain in gains.items() if gain >= min(most, most / 2))


def add_indistinguishable(levels: Sequence[Candidate], one: Combination, signal: Signal) -> Combination:
    """Add to a combination the alternatives that a signal cannot distinguish from it; each replaces one level.

    Only rows where the signal was judged can distinguish levels. A level that all of these rows have is no alternative:
    for example, gradients are judged only in training.
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
    """Return the signals without the red rows that any of the combinations `found` explains."""
    left = dict(signals)
    for combination in found:
        left = {name: s.remove(combination.rows) if explains(combination, s) else s for name, s in left.items()}
    return left


def _find_best(levels: Sequence[Candidate], signals: Mapping[str, Signal]) -> Combination | None:
    """Find the combination with the largest gain minus cost; None if none reaches `_MIN_GAIN`."""
    red_signals = [signal for signal in signals.values() if signal.red]
    if not red_signals:
        return None
    seen = functools.reduce(lambda rows, signal: rows | signal.red | signal.green, red_signals, 0)
    cost = math.log(max(2, len(levels)))
    best: tuple[float, float] | None = None
    by_rows: dict[int, list[tuple[float, tuple[int, ...]]]] = {}
    winner = 0
    red = functools.reduce(lambda rows, signal: rows | signal.red, red_signals, 0)
    for price, numbers, rows in _iter_combinations(levels, seen, cost, red):
        tied = by_rows.setdefault(rows, [])
        tied.append((price, numbers))
        if len(tied) > 1 and price >= min(other for other, _ in tied[:-1]):
            continue  # a combination with the same rows that costs no more was already scored
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


def _iter_combinations(
    levels: Sequence[Candidate], seen: int, cost: float, red: int
) -> Iterator[tuple[float, tuple[int, ...], int]]:
    """Yield the cost, the levels and the rows of each combination of at most two levels.

    A pair is left out if its common rows are all rows of one of its levels: then that level suffices. A level or pair
    without a red row is left out too.
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
    """Compute the gain in log likelihood, in nats, if having a combination decides which rows of a signal are red.

    The alternative is one rate of red for all rows. `rows` are the rows with the combination. The gain is minus
    infinity if red is more frequent without the combination.
    """
    red, green = (rows & signal.red).bit_count(), (rows & signal.green).bit_count()
    other_red, other_green = signal.red.bit_count() - red, signal.green.bit_count() - green
    if red * other_green < other_red * green:  # red is more frequent in rows without the combination
        return -math.inf
    return _compute_gain_of_counts(red, green, other_red, other_green)


@functools.lru_cache(maxsize=1 << 16)
def _compute_gain_of_counts(red: int, green: int, other_red: int, other_green: int) -> float:
    split = _compute_evidence(red, green, *_RATE_WITH) + _compute_evidence(other_red, other_green, *_RATE_WITHOUT)
    return split - _compute_evidence(red + other_red, green + other_green, *_RATE_OF_ANY)


@functools.lru_cache(maxsize=1 << 16)
def _compute_evidence(red: int, green: int, a: float, b: float) -> float:
    """Compute the log likelihood of a sequence of red and green rows, if the rate of red has a beta(`a`, `b`) prior."""
    return _compute_log_beta(red + a, green + b) - _compute_log_beta(a, b)


def _compute_log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
