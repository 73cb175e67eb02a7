"""Recognise right values at wrong places: shifted, reversed, transposed, reordered heads, or another result."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from conformance.truth.error_patterns.axis_indices import NOUNS
from conformance.truth.error_patterns.failure import Failure
from conformance.truth.error_patterns.fitting import MIN_EXPLAINED, Sample

_MAX_SLICES = 32  # longest axis along which other orders of slices are tried
_MAX_LISTED = 16


def iter_displacements(sample: Sample) -> Iterator[str]:
    """Yield descriptions of displaced values, the plainest first; those that do not fit are empty."""
    yield from _iter_shifts(sample)
    yield from _iter_transpositions(sample)
    yield from _iter_relayouts(sample)
    for letter in "NKB":
        yield _describe_reordering(sample, letter)


def iter_other_results(sample: Sample) -> Iterator[str]:
    """Yield descriptions of values that are those of another result; those that do not fit are empty."""
    failure = sample.failure
    for name, other in failure.others.items():
        if other.value.shape == failure.got.shape and other.value is not failure.expected.value:
            yield _say_if(sample.fits(other.value[sample.index], other.bound[sample.index]), f"what `{name}` must be")
    if failure.observable == "logsumexp" and "max_logits" in failure.others:
        top = failure.others["max_logits"].value[sample.index]
        if failure.problem.sinks is not None:
            top = np.maximum(top, failure.problem.sinks[sample.index[1]])
        with np.errstate(invalid="ignore"):
            total = np.where(np.isfinite(top), sample.right - top, 0.0)
        yield _say_if(sample.fits(total), "the logarithm of the sum, without the maximum")
        yield _say_if(sample.fits(np.exp(total), np.exp(total) * sample.bound), "the sum itself, not its logarithm")


def _iter_shifts(sample: Sample) -> Iterator[str]:
    """Yield descriptions of values shifted by one row or key, or in reverse order; empty if they do not fit."""
    for letter in "TS":
        if letter not in sample.failure.letters:
            continue
        axis, noun = sample.failure.letters.index(letter), NOUNS[letter]
        length = sample.failure.got.shape[axis]
        for by, words in ((-1, f"the {noun} before"), (1, f"the {noun} after")):
            there = sample.index[axis] + by
            inside = (there >= 0) & (there < length)
            kept = sample.only(inside)
            yield _say_if(_fits_at(kept, axis, there[inside]), f"each {noun} what {words} must be")
        yield _say_if(_fits_at(sample, axis, length - 1 - sample.index[axis]), f"{noun}s in reverse")


def _iter_transpositions(sample: Sample) -> Iterator[str]:
    """Yield descriptions of two exchanged axes of the same length; empty if they do not fit."""
    letters, shape = sample.failure.letters, sample.failure.got.shape
    for one in range(len(letters)):
        for other in range(one + 1, len(letters)):
            if shape[one] == shape[other] > 1:
                index = list(sample.index)
                index[one], index[other] = index[other], index[one]
                words = f"{letters[one]} and {letters[other]} exchanged: transposed"
                yield _say_if(_fits_index(sample, tuple(index)), words)


def _iter_relayouts(sample: Sample) -> Iterator[str]:
    """Yield descriptions of neighbouring axes stored in one order and read in the other; empty if they do not fit."""
    letters, shape = sample.failure.letters, sample.failure.got.shape
    for axis in range(len(letters) - 1):
        if 1 in shape[axis : axis + 2]:
            continue
        index, order = list(sample.index), list(letters)
        place = index[axis] * shape[axis + 1] + index[axis + 1]
        index[axis], index[axis + 1] = place % shape[axis], place // shape[axis]
        order[axis], order[axis + 1] = order[axis + 1], order[axis]
        words = f"laid out as [{', '.join(order)}] and read as [{', '.join(letters)}]"
        yield _say_if(_fits_index(sample, tuple(index)), words)


def _describe_reordering(sample: Sample, letter: str) -> str:
    """Describe the order in which right slices along an axis stand; empty if no other order explains the errors."""
    failure = sample.failure
    if letter not in failure.letters:
        return ""
    axis = failure.letters.index(letter)
    length = failure.got.shape[axis]
    if not 1 < length <= _MAX_SLICES:
        return ""
    here = sample.index[axis]
    present = np.unique(here)
    source, predicted, bound = {}, sample.right.copy(), sample.bound.copy()
    at = _build_reader(sample, axis)
    for target in present:
        part = sample.only(here == target)
        for candidate in (int(target), *range(length)):
            value, its_bound = at(part, candidate)
            if part.close(value, its_bound).mean() >= MIN_EXPLAINED:
                source[int(target)] = candidate
                predicted[here == target], bound[here == target] = value, its_bound
                break
        else:
            return ""
    if all(target == candidate for target, candidate in source.items()) or not sample.fits(predicted, bound):
        return ""
    return _format_order(source, length, NOUNS[letter], failure)


def _format_order(source: dict[int, int], length: int, noun: str, failure: Failure) -> str:
    """Describe the order of slices along an axis; `source` maps each slice to the right slice that stands there."""
    found = set(source.values())
    if len(found) == 1:
        return f"each {noun} what {noun} {found.pop()} must be"
    steps = {candidate - target for target, candidate in source.items()}
    if len(steps) == 1:
        return f"each {noun} what the one {'after' if steps.pop() > 0 else 'before'} must be"
    if all(candidate == length - 1 - target for target, candidate in source.items()):
        return f"{noun}s in reverse"
    groups = length // failure.group
    if noun == "head" and all(n == target % groups * failure.group + target // groups for target, n in source.items()):
        return "heads interleaved, not grouped"
    if len(source) <= _MAX_LISTED:
        return f"{noun}s in another order: {', '.join(f'{t} is {c}' for t, c in source.items() if t != c)}"
    return f"{noun}s in another order"


def _build_reader(sample: Sample, axis: int) -> Callable[[Sample, int], tuple[np.ndarray, np.ndarray]]:
    """Build a function that reads the right values and bounds of a sample at another index along an axis."""

    def read(part: Sample, candidate: int) -> tuple[np.ndarray, np.ndarray]:
        index = list(part.index)
        index[axis] = np.full_like(index[axis], candidate)
        return sample.failure.expected.value[tuple(index)], sample.failure.expected.bound[tuple(index)]

    return read


def _fits_at(sample: Sample, axis: int, there: np.ndarray) -> bool:
    """Check whether the right values at other indices along one axis explain the errors."""
    index = list(sample.index)
    index[axis] = there
    return _fits_index(sample, tuple(index))


def _fits_index(sample: Sample, index: tuple[np.ndarray, ...]) -> bool:
    """Check whether the right values at other indices explain the errors."""
    expected = sample.failure.expected
    return sample.fits(expected.value[index], expected.bound[index])


def _say_if(holds: bool, words: str) -> str:
    """Return the words if the description holds, otherwise an empty string."""
    return words if holds else ""
