"""Describe what a wrong result holds: zeros, a constant, multiples, right values at wrong places, or rounding."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from conformance.truth.patterns.factors import named_factors
from conformance.truth.patterns.failure import DEPTHS, Failure
from conformance.truth.patterns.fitting import FEWEST, Sample, sample
from conformance.truth.patterns.moves import another_result, moved
from conformance.truth.patterns.noise import rounded, scattered

_FEWEST_ALIKE = 8


def displaced(failure: Failure) -> str:
    """Describe right values at wrong places, over all elements of the result; empty if they are not."""
    whole = sample(failure, np.ones((), bool))
    return next((words for words in _displaced(whole) if words), "") if whole.wrong.any() else ""


def _displaced(found: Sample) -> Iterator[str]:
    """Yield descriptions of right values at wrong places; those that do not fit are empty."""
    yield from another_result(found)
    yield from moved(found)


def form(failure: Failure, elements: np.ndarray) -> str:
    """Describe what some elements of a wrong result hold; empty if no description fits."""
    whole = sample(failure, elements)
    if not whole.wrong.any():  # only the root mean square exceeds its limit
        return rounded(whole) or scattered(whole)
    return next((words for words in _forms(whole) if words), "")


def _forms(whole: Sample) -> Iterator[str]:
    """Yield descriptions, the most specific first; those that do not fit are empty."""
    yield _zero(whole)
    yield _alike(whole)
    yield _finite(whole)
    wrong = whole.only(whole.wrong)
    yield _of_the_wrong(_zero(wrong))
    yield from _displaced(whole)
    yield from named_factors(whole)
    yield _same_rows(whole.failure, whole)
    yield _of_the_wrong(_alike(wrong))
    for words in another_result(wrong):
        yield _of_the_wrong(words)
    yield rounded(whole)
    yield scattered(whole)


def _of_the_wrong(words: str) -> str:
    """Say that a description holds for the wrong elements only."""
    return f"what is wrong is {words}" if words else ""


def _zero(found: Sample) -> str:
    """Describe zeros in place of other values."""
    zeros = not found.got.any()
    return "zero" if zeros and found.wrong.sum() >= min(FEWEST, found.got.size) and found.right.any() else ""


def _alike(found: Sample) -> str:
    """Describe one value in place of many."""
    right = _finite_of(found.right)
    if found.got.size < _FEWEST_ALIKE or not (found.got == found.got[0]).all() or (np.ptp(right) == 0 and right.any()):
        return ""
    return f"one value everywhere, {found.got[0]:.4g}"


def _finite_of(values: np.ndarray) -> np.ndarray:
    """Select the finite values; one zero if there are none."""
    finite = values[np.isfinite(values)]
    return finite if finite.size else np.zeros(1)


def _finite(found: Sample) -> str:
    """Describe finite values where -inf is right, as in rows without keys."""
    wrong = found.wrong
    if wrong.any() and np.isneginf(found.right[wrong]).all() and np.isfinite(found.got[wrong]).all():
        return "finite where -inf is right"
    return ""


def _same_rows(failure: Failure, found: Sample) -> str:
    """Describe rows or keys that are all the same where the right ones differ."""
    axis = next((failure.letters.index(letter) for letter in "TS" if letter in failure.letters), None)
    if axis is None or failure.got.shape[axis] < FEWEST or failure.letters[-1] not in DEPTHS:
        return ""
    first = list(found.index)
    first[axis] = np.full_like(first[axis], int(found.index[axis].min()))
    differ = np.ptp(failure.expected.value, axis=axis).any()
    noun = "row" if "T" in failure.letters else "key"
    same = found.got.any() and np.array_equal(found.got, failure.values[tuple(first)])
    return f"every {noun} the same" if same and differ and len(np.unique(found.index[axis])) >= FEWEST else ""
