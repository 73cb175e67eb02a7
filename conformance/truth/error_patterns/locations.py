"""Find where a result is wrong: one location that holds all wrong elements and little else.

A location is accepted only if all of these hold. A unit is a row, a key or a pair.

- No judged element outside is wrong, and at least half of the units inside are (`MIN_DENSITY`).
- Units that are wrong at random would all lie inside with a probability of at most `10**MAX_LOG_CHANCE`.
- The error ends at the border. In units of the bound, the error of the median wrong unit is `MIN_CONTRAST` times that
  of the worst unit outside. As an absolute error, it is `MIN_CONTRAST` times that of the median unit outside. So an
  error that fades out has no location, and narrow bounds alone make none.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from conformance.truth.error_patterns.axis_indices import describe_indices
from conformance.truth.error_patterns.failure import DEPTH_LETTERS, Failure
from conformance.truth.error_patterns.mask_facts import iter_mask_facts

MIN_DENSITY = 0.5
MIN_CONTRAST = 3.0
_AXIS_ORDER = "BNKTSL"  # order in which the axes are described
_AXES_RANK = 1  # rank of locations by indices: after likely causes by the mask (0), before other mask relations (2)
MAX_LOG_CHANCE = -5.0
"""Largest logarithm (base 10) of the probability that units wrong at random would all lie in a location.

Some hundred locations are tried, so one in a thousand random errors gets a location.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class Location:
    """A location of wrong elements."""

    words: str  # the description, which follows the word "only"
    elements: np.ndarray  # booleans broadcastable to the elements, true inside the location
    # Sizes of the blocks of queries and of keys whose borders the location follows; 0 if it follows none.
    blocks: tuple[int, int] = (0, 0)


@dataclasses.dataclass(frozen=True, eq=False)
class _Candidate:
    """A location that holds all wrong units."""

    words: str
    name: str  # the relation to the mask, without heads and batch rows; empty if the location is given by indices
    units: np.ndarray  # booleans of the units, true inside the location
    filled: float  # share of its judged units that are wrong
    rank: int  # order of preference among locations with the same `filled`; the lowest rank is chosen
    blocks: tuple[int, int]


def find_location(failure: Failure, special: np.ndarray | None = None) -> Location | None:
    """Find the location of the wrong elements, or of those in `special`, such as NaN; None if none is accepted."""
    wrong = failure.wrong if special is None else special
    if not wrong.any():
        return None
    telling = failure.informative if special is None else failure.judged
    units, judged = failure.reduce_to_units(wrong), failure.reduce_to_units(telling)
    if units.sum() == 1 and judged.sum() > 1:
        return _describe_single_unit(failure, wrong, units)
    strengths = [failure.reduce_to_units(x) for x in _measure_errors(failure, special)]
    # Special values in exactly the units of a cause by the mask, such as all rows without keys, are not there by
    # chance, however few these units are.
    found = [
        one
        for one in _iter_candidates(failure, units, judged)
        if _is_location(one.units, units, judged, *strengths)
        or (special is not None and one.rank == 0 and one.filled == 1)
    ]
    words, chosen, blocks = _choose_best(found, judged)
    if chosen is None:
        chosen = np.ones(units.shape, bool)
    elements = failure.to_elements(chosen)
    columns = _find_columns(failure, wrong, np.broadcast_to(elements, wrong.shape) & telling, special)
    if columns is not None:
        words = f"{words}, {columns.words}" if words else columns.words
        elements = elements & columns.elements
    return Location(words, elements, blocks) if words else None


def _describe_single_unit(failure: Failure, wrong: np.ndarray, units: np.ndarray) -> Location:
    """Describe the location of a single wrong unit by its index."""
    index = ", ".join(str(int(i[0])) for i in np.nonzero(units))
    if wrong.sum() == 1 and wrong.size > units.size:
        return Location("one element", wrong)
    noun = {"BSK": "key", "BNTS": "pair", "N": "head", "LN": "entry"}.get(failure.unit_letters, "row")
    return Location(f"one {noun}, [{', '.join(failure.unit_letters)}] = [{index}]", failure.to_elements(units))


def _iter_candidates(failure: Failure, wrong: np.ndarray, judged: np.ndarray) -> Iterator[_Candidate]:
    """Yield locations that hold all wrong units: by indices along axes, and by relations to the mask."""
    product, words, sizes = np.ones(wrong.shape, bool), [], dict.fromkeys("TS", 0)
    beside = np.ones(wrong.shape, bool), list[str]()  # heads and batch rows, to be combined with a mask fact
    for letter in sorted(failure.unit_letters, key=_AXIS_ORDER.index):
        axis = failure.unit_letters.index(letter)
        others = tuple(other for other in range(wrong.ndim) if other != axis)
        found = describe_indices(letter, _reduce_any(wrong, others), _reduce_any(judged, others), failure.group)
        if found is None:
            continue
        chosen = np.expand_dims(found.chosen, others)
        product, sizes[letter] = product & chosen, found.block
        words.append(found.words)
        if letter not in "TS":
            beside[0][...] &= chosen
            beside[1].append(found.words)
    if words:
        yield _Candidate(
            ", ".join(words), "", product, _compute_filled(product, wrong, judged), _AXES_RANK, (sizes["T"], sizes["S"])
        )
    for fact in iter_mask_facts(failure):
        rank = 0 if fact.is_cause else 2
        here = np.broadcast_to(fact.units, wrong.shape)
        if not (judged & ~here).any():
            continue
        for chosen, more in ((here, []), beside):
            units = here & chosen
            if not (wrong & ~units).any():
                said = ", ".join((fact.words, *more))
                yield _Candidate(said, fact.words, units, _compute_filled(units, wrong, judged), rank, (0, fact.block))


def _choose_best(found: Sequence[_Candidate], judged: np.ndarray) -> tuple[str, np.ndarray | None, tuple[int, int]]:
    """Choose the candidate with the largest share of wrong units.

    If a candidate of the other kind (along axes, or by the mask) has the same units, the words mention both.

    Returns:
      words, units and blocks of the location; the units are None if there is no candidate.
    """
    if not found:
        return "", None, (0, 0)
    ranked = sorted(found, key=lambda one: (-round(one.filled, 2), one.rank))
    best = ranked[0]
    same = [one for one in ranked[1:] if np.array_equal(one.units & judged, best.units & judged)]
    other = next((one for one in same if (one.rank == _AXES_RANK) != (best.rank == _AXES_RANK)), None)
    if other is None:
        return best.words, best.units, best.blocks
    axis, fact = (best, other) if best.rank == _AXES_RANK else (other, best)
    return (
        f"{axis.words} ({fact.words})",
        best.units,
        (max(axis.blocks[0], fact.blocks[0]), max(axis.blocks[1], fact.blocks[1])),
    )


def _compute_filled(units: np.ndarray, wrong: np.ndarray, judged: np.ndarray) -> float:
    """Compute which share of the judged units inside a location is wrong."""
    inside = int((units & judged).sum())
    return float((wrong & units).sum() / inside) if inside else 0.0


def _measure_errors(failure: Failure, special: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Measure how wrong each element is: in units of its bound, and as an absolute error."""
    if special is not None:  # special values need no contrast: they are either there or not
        return 1.0 * special, 1.0 * special
    ratios = np.where(failure.informative, failure.ratios, -1.0)
    exact = not failure.expected.bound[failure.wrong].any()  # with bounds of zero, any error is wrong
    return ratios, 1.0 * failure.wrong if exact else failure.errors


def _is_location(
    units: np.ndarray, wrong: np.ndarray, judged: np.ndarray, ratios: np.ndarray, errors: np.ndarray
) -> bool:
    """Check whether a location is accepted (module docstring)."""
    inside, outside = units & judged, judged & ~units
    if not outside.any() or (wrong & outside).any() or wrong.sum() < MIN_DENSITY * inside.sum():
        return False
    if _compute_log_chance(int(wrong.sum()), int(inside.sum()), int(judged.sum())) > MAX_LOG_CHANCE:
        return False
    by_bound = np.median(ratios[wrong]) >= MIN_CONTRAST * ratios[outside].max()
    return bool(by_bound and np.median(errors[wrong]) >= MIN_CONTRAST * np.median(errors[outside]))


def _compute_log_chance(wrong: int, inside: int, judged: int) -> float:
    """Compute the logarithm (base 10) of the probability that so many random units all lie inside."""
    ways = [math.lgamma(n + 1) - math.lgamma(n - wrong + 1) for n in (inside, judged)]
    return (ways[0] - ways[1]) / math.log(10)


def _reduce_any(units: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Reduce booleans by "or" over axes."""
    return np.logical_or.reduce(units, axis=axes)


def _find_columns(
    failure: Failure, wrong: np.ndarray, inside: np.ndarray, special: np.ndarray | None
) -> Location | None:
    """Find the columns (indices along the depth) that hold all wrong elements of a location; None if there are none."""
    if failure.letters[-1] not in DEPTH_LETTERS or wrong.shape[-1] < 2:
        return None
    axes = tuple(range(wrong.ndim - 1))
    found = describe_indices(failure.letters[-1], _reduce_any(wrong, axes), _reduce_any(inside, axes), failure.group)
    if found is None or not _is_location(
        found.chosen & inside, wrong & inside, inside, *_measure_errors(failure, special)
    ):
        return None
    return Location(found.words, found.chosen)
