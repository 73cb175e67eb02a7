"""Locating faults: the levels, alone or in pairs, that tell what is red from what is green.

Every row of a covering array has many levels, and every pair of levels stands in some row. Which of them a fault needs
follows from which rows fail. Nie and Leung call the least of them the minimal failure-causing schema ("The minimal
failure-causing schema of combinatorial testing", ACM TOSEM 20(4), 2011). Colbourn and McClary say from which arrays
that can always be told ("Locating and detecting arrays for interaction faults", Journal of Combinatorial Optimization
15, 2008). A covering array is not one of them: what it cannot tell apart is returned as such. BEN ranks suspicious
combinations (Ghandehari, Lei, Xie, Kuhn and Kacker, "Identifying failure-inducing combinations in a combinatorial test
set", ICST 2012) and confirms them by further tests, as `conformance.judging.failure_probes.confirmation` does.

Three things are other than there. A wrong row may be right by chance, since a wrong mask matters little to some values:
so a split is scored, and need not be clean. It is scored by how much likelier it makes the evidence that nearly all
rows with the combination are red, and nearly none without it, against one rate of red for all. There are several
faults at once: the best combination explains its red rows, the rest is explained by the next, and then each is looked
for again among what the others leave. And a fault shows in several results of a row, the *signals*. They say the same,
so that the clearest counts, and not their sum.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

MAX_COMBINATIONS = 12
"""Combinations that are looked for: more faults than that at once nobody tells apart."""
_PASSES = 2  # looking again at each among what the others leave

# With a combination, rows are red but for what hides it; without, none but for other faults that are not found yet. As
# distributions of the rate of red (beta), flat at the side that is expected and steep at the other.
_RATE_WITH, _RATE_WITHOUT, _RATE_OF_ANY = (1.0, 0.5), (0.3, 1.0), (1.0, 1.0)
_MIN_GAIN = 0.5
"""How much likelier at least, in nats, a combination must make what was seen, its complexity taken off."""


@dataclasses.dataclass(frozen=True)
class Signal:
    """Where one result is red, and where it is green: sets of rows, as bits."""

    red: int
    green: int

    def but(self, rows: int) -> Signal:
        """What is left if red rows are explained otherwise."""
        return Signal(self.red & ~rows, self.green)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A level: the rows that have it, and how much less than others it is believed to matter, in nats."""

    rows: int
    odds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Combination:
    """Levels by their numbers, none of them for every row; `rows` have them all, and `others` have the same rows."""

    levels: tuple[int, ...]
    rows: int
    others: tuple[tuple[int, ...], ...] = ()


def locate(
    levels: Sequence[Candidate], signals: Mapping[str, Signal], found: Sequence[Combination] = ()
) -> list[Combination]:
    """The fewest combinations that explain the red rows of all signals, as far as they can be told.

    Args:
      levels: those that a row may have.
      signals: by name, those first in which a fault shows most plainly.
      found: what explains red rows already.
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
    """Whether a signal is red as that combination would make it."""
    return _compute_gain(combination.rows, signal) > 0 and bool(combination.rows & signal.red)


def find_clearest_signal(combination: Combination, signals: Mapping[str, Signal]) -> str:
    """The signal by which a combination is shown best: of those that say nearly as much as any, the first."""
    gains = {name: _compute_gain(combination.rows, signal) for name, signal in signals.items()}
    most = max(gains.values())  # below zero where no signal is as the combination would make it
    return next(name for name, gain in gains.items() if gain >= min(most, most / 2))


def add_indistinguishable(levels: Sequence[Candidate], one: Combination, signal: Signal) -> Combination:
    """The combination, with the others that a signal cannot tell from it: each has one other level in place of one.

    What other results say of more cases does not tell them apart where this one was not asked. A level that all cases
    have where it was asked, as gradients are asked in training, is none of them.
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
    """What is left of the signals when those combinations explain what they explain."""
    left = dict(signals)
    for combination in found:
        left = {name: s.but(combination.rows) if explains(combination, s) else s for name, s in left.items()}
    return left


def _find_best(levels: Sequence[Candidate], signals: Mapping[str, Signal]) -> Combination | None:
    """The combination that explains most for how complex it is; none if none explains anything."""
    open_ones = [signal for signal in signals.values() if signal.red]
    if not open_ones:
        return None
    seen = functools.reduce(lambda rows, signal: rows | signal.red | signal.green, open_ones, 0)
    cost = math.log(max(2, len(levels)))
    best: tuple[float, float] | None = None
    by_rows: dict[int, list[tuple[float, tuple[int, ...]]]] = {}
    winner = 0
    for price, numbers, rows in _iter_combinations(levels, seen, cost, _join_red(open_ones)):
        tied = by_rows.setdefault(rows, [])
        tied.append((price, numbers))
        if len(tied) > 1 and price >= min(other for other, _ in tied[:-1]):
            continue
        gains = [_compute_gain(rows, signal) for signal in open_ones]
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
    """Price, levels and rows of each combination: no level, one, or two that say more than either alone."""
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
    """How much likelier it makes a signal, in nats, that it goes by these rows."""
    red, green = (rows & signal.red).bit_count(), (rows & signal.green).bit_count()
    other_red, other_green = signal.red.bit_count() - red, signal.green.bit_count() - green
    if red * other_green < other_red * green:  # it is red sooner without
        return -math.inf
    return _compute_gain_of_counts(red, green, other_red, other_green)


@functools.lru_cache(maxsize=1 << 16)
def _compute_gain_of_counts(red: int, green: int, other_red: int, other_green: int) -> float:
    split = _compute_evidence(red, green, *_RATE_WITH) + _compute_evidence(other_red, other_green, *_RATE_WITHOUT)
    return split - _compute_evidence(red + other_red, green + other_green, *_RATE_OF_ANY)


@functools.lru_cache(maxsize=1 << 16)
def _compute_evidence(red: int, green: int, a: float, b: float) -> float:
    """The logarithm of how likely so many red and green rows are, in one order, whose rate is beta-distributed."""
    return _compute_log_beta(red + a, green + b) - _compute_log_beta(a, b)


def _compute_log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
