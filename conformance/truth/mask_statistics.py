"""Test by exact binomial probabilities whether weights are dropped at a given rate and independently.

A mask is an array of booleans, true where a weight is kept. Let each weight be dropped with probability `p`,
independently of all others:

- The number of kept weights among `n` is binomial with probability `1 - p`.
- Two masks agree at a place with probability `p^2 + (1 - p)^2`, so the number of agreements is binomial too.
- The corners of a rectangle have an even number of kept weights with probability `(1 + (1 - 2p)^4) / 2`.

Counts over disjoint places are independent, so these probabilities are exact, for any number of places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import bdtr, bdtrc

ALPHA = 1e-9
"""The probability that a correct generator fails any one family of counts, over all of its counts together."""
_SHIFTS = (1, 2, 3, 4, 8, 16, 32, 64, 128)
_BLOCK = 32


@dataclasses.dataclass(frozen=True)
class Surprise:
    """The least probable of a family of counts.

    Attributes:
      where: the count, in words.
      found: the share that was counted.
      expected: the share to be expected.
      places: how many places were counted.
      probability: the probability of a count as far from what is expected, times the number of counts in the family.
    """

    where: str
    found: float
    expected: float
    places: int
    probability: float

    @property
    def is_credible(self) -> bool:
        """Whether the probability is above `ALPHA`, so that the count passes."""
        return self.probability > ALPHA


def compute_tails(counts: np.ndarray, places: np.ndarray, probability: float) -> np.ndarray:
    """Compute the probability of counts at least as far on the same side, times two and at most 1.

    Args:
      counts: how often an event occurred, any shape.
      places: among how many independent places, in the same shape.
      probability: the probability of the event at each place.
    """
    counts, places = np.asarray(counts, np.float64), np.asarray(places, np.int64)
    below = np.where(places > 0, bdtr(counts, np.maximum(places, 1), probability), 1.0)
    above = np.where((places > 0) & (counts > 0), bdtrc(counts - 1, np.maximum(places, 1), probability), 1.0)
    return np.minimum(2 * np.minimum(below, above), 1.0)


def judge_rate(kept: np.ndarray, seen: np.ndarray, rate: float) -> Surprise:
    """Test the number of kept weights: over all, by mask, head, batch row, query, key, and in blocks.

    Args:
      kept: masks, booleans `[M, B, N, T, S]`.
      seen: the places that can be seen, booleans `[B, N, T, S]`.
      rate: the probability that a weight is dropped.
    """
    counted, places = kept & seen, np.broadcast_to(seen, kept.shape)
    families = {
        "all weights": (0, 1, 2, 3, 4),
        "the mask of a dropout key": (1, 2, 3, 4),
        "a batch row": (0, 2, 3, 4),
        "a head": (0, 1, 3, 4),
        "a query": (0, 1, 2, 4),
        "a key": (0, 1, 2, 3),
    }
    sums = [(name, counted.sum(axis=axes), places.sum(axis=axes)) for name, axes in families.items()]
    blocks = [_sum_blocks(x) for x in (counted, places)]
    sums.append((f"a block of {_BLOCK} queries and keys", blocks[0], blocks[1]))
    return _find_least(sums, 1 - rate)


def judge_independence(kept: np.ndarray, seen: np.ndarray, rate: float) -> tuple[Surprise, Surprise, Surprise]:
    """Test whether weights are dropped independently of each other.

    Returns:
      the surprises of masks of other keys, batch rows and heads compared with each other; of queries and keys compared
      with those some places further on; and of the corners of rectangles.
    """
    masks, batch, heads = kept.shape[:3]
    seen_all = np.broadcast_to(seen, kept.shape)
    alike = rate**2 + (1 - rate) ** 2
    planes = (-1, *kept.shape[3:])
    counted, places, pairs = _compare_planes(kept.reshape(planes), seen_all.reshape(planes))
    labels = [tuple(np.unravel_index(plane, (masks, batch, heads)) for plane in pair) for pair in pairs]
    between = _find_least([("two masks", counted, places)], alike, labels)
    shifted, corners = [], []
    for axis, name in ((3, "queries"), (4, "keys")):
        for shift in (d for d in _SHIFTS if d < kept.shape[axis]):
            one, other = _split_disjoint(kept, axis, shift)
            both = np.logical_and(*_split_disjoint(seen_all, axis, shift))
            shifted.append((f"{name} {shift} apart", _count((one == other) & both), _count(both)))
    if kept.shape[3] == kept.shape[4]:
        upper = np.triu(np.ones(kept.shape[3:], bool), 1) & seen_all & np.swapaxes(seen_all, 3, 4)
        same = (kept == np.swapaxes(kept, 3, 4)) & upper
        shifted.append(("queries and keys exchanged", _count(same), _count(upper)))
    for down in (d for d in _SHIFTS if d < kept.shape[3]):
        parity = np.logical_xor(*_split_disjoint(kept, 3, down))
        both = np.logical_and(*_split_disjoint(seen_all, 3, down))
        for across in (d for d in _SHIFTS if d < kept.shape[4]):
            even = ~np.logical_xor(*_split_disjoint(parity, 4, across))
            four = np.logical_and(*_split_disjoint(both, 4, across))
            name = f"corners of rectangles of {down} queries and {across} keys"
            corners.append((name, _count(even & four), _count(four)))
    return between, _find_least(shifted, alike), _find_least(corners, (1 + (1 - 2 * rate) ** 4) / 2)


def _count(places: np.ndarray) -> np.ndarray:
    """Return the number of true places, as an array of one count."""
    return np.array([places.sum()])


def _find_least(
    families: Sequence[tuple[str, np.ndarray, np.ndarray]], probability: float, pairs: Sequence[Any] = ()
) -> Surprise:
    """Find the least probable count of several families: pairs of a name, counts and numbers of places.

    `pairs` says which planes each count of a single family compares.
    """
    tests = sum(counts.size for _, counts, _ in families)
    found = []
    for name, counts, places in families:
        tails = compute_tails(counts, places, probability)
        least = np.unravel_index(int(np.argmin(tails)), tails.shape)
        n = int(places[least])
        name = _name_pair(*pairs[int(least[0])]) if pairs else name
        found.append(
            Surprise(name, float(counts[least]) / max(n, 1), probability, n, min(float(tails[least]) * tests, 1.0))
        )
    return min(found, key=lambda one: one.probability, default=Surprise("nothing", probability, probability, 0, 1.0))


def _sum_blocks(x: np.ndarray) -> np.ndarray:
    """Sum `[M, B, N, T, S]` over the first three axes and over blocks of queries and keys."""
    summed = x.sum(axis=(0, 1, 2))
    for axis in (0, 1):
        summed = np.add.reduceat(summed, np.arange(0, summed.shape[axis], _BLOCK), axis=axis)
    return np.asarray(summed)


def _split_disjoint(x: np.ndarray, axis: int, shift: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the entries along an axis and those `shift` further on, so that no entry occurs twice."""
    first = np.flatnonzero(np.arange(x.shape[axis] - shift) % (2 * shift) < shift)
    return np.take(x, first, axis=axis), np.take(x, first + shift, axis=axis)


def _compare_planes(planes: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int]]]:
    """Count where each pair of planes `[P, T, S]` agrees, and among how many places that both see."""
    open_ = seen.reshape(len(planes), -1).astype(np.float32)  # counts stay below 2**24, so they are exact
    signs = np.where(planes.reshape(len(planes), -1), 1, -1).astype(np.float32) * open_
    agree, both = signs @ signs.T, open_ @ open_.T
    first, second = np.triu_indices(len(planes), 1)
    places = both[first, second]
    labels = list(zip(first.tolist(), second.tolist(), strict=True))
    return (agree[first, second] + places) / 2, places, labels


def _name_pair(one: Sequence[np.intp], other: Sequence[np.intp]) -> str:
    """Name two planes by what differs between them: the dropout key, the batch row, the head."""
    parts = [
        f"{name} {int(a)} and {int(b)}"
        for name, a, b in zip(("dropout keys", "batch rows", "heads"), one, other, strict=True)
        if a != b
    ]
    return ", ".join(parts)
