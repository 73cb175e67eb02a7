"""Describe what a wrong result holds: zeros, a constant, multiples, right values at wrong places, or rounding."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from conformance.truth.error_patterns.displacements import iter_displacements, iter_other_results
from conformance.truth.error_patterns.factors import iter_factors
from conformance.truth.error_patterns.failure import DEPTH_LETTERS, Failure
from conformance.truth.error_patterns.fitting import MIN_WRONG, Sample, sample_elements
from conformance.truth.error_patterns.rounding_noise import describe_rounded, describe_scattered

_MIN_ALIKE = 8


def describe_displaced(failure: Failure) -> str:
    """Describe the result as right values at wrong places, fitted to all its elements; empty if that does not fit."""
    whole = sample_elements(failure, np.ones((), bool))
    return next((words for words in _iter_displaced(whole) if words), "") if whole.wrong.any() else ""


def _iter_displaced(found: Sample) -> Iterator[str]:
    """Yield descriptions of right values at wrong places; those that do not fit are empty."""
    yield from iter_other_results(found)
    yield from iter_displacements(found)


def describe_values(failure: Failure, elements: np.ndarray) -> str:
    """Describe what some elements of a wrong result hold; empty if no description fits."""
    whole = sample_elements(failure, elements)
    if not whole.wrong.any():  # only the root mean square exceeds its limit
        return describe_rounded(whole) or describe_scattered(whole)
    return next((words for words in _iter_descriptions(whole) if words), "")


def _iter_descriptions(whole: Sample) -> Iterator[str]:
    """Yield descriptions, the most specific first; those that do not fit are empty."""
    yield _describe_zero(whole)
    yield _describe_constant(whole)
    yield _describe_finite(whole)
    wrong = whole.only(whole.wrong)
    yield _limit_to_wrong(_describe_zero(wrong))
    yield from _iter_displaced(whole)
    yield from iter_factors(whole)
    yield _describe_same_rows(whole.failure, whole)
    yield _limit_to_wrong(_describe_constant(wrong))
    for words in iter_other_results(wrong):
        yield _limit_to_wrong(words)
    yield describe_rounded(whole)
    yield describe_scattered(whole)


def _limit_to_wrong(words: str) -> str:
    """Turn a description of the wrong elements into one that says so; empty if it is empty."""
    return f"what is wrong is {words}" if words else ""


def _describe_zero(found: Sample) -> str:
    """Describe zeros in place of other values; empty if not all elements are zero."""
    zeros = not found.got.any()
    return "zero" if zeros and found.wrong.sum() >= min(MIN_WRONG, found.got.size) and found.right.any() else ""


def _describe_constant(found: Sample) -> str:
    """Describe one value in place of different ones; empty if the elements are not all equal."""
    right = _select_finite(found.right)
    if found.got.size < _MIN_ALIKE or not (found.got == found.got[0]).all() or (np.ptp(right) == 0 and right.any()):
        return ""
    return f"one value everywhere, {found.got[0]:.4g}"


def _select_finite(values: np.ndarray) -> np.ndarray:
    """Select the finite values; one zero if there are none."""
    finite = values[np.isfinite(values)]
    return finite if finite.size else np.zeros(1)


def _describe_finite(found: Sample) -> str:
    """Describe finite values where -inf is right, as in rows without keys; empty if there are other errors."""
    wrong = found.wrong
    if wrong.any() and np.isneginf(found.right[wrong]).all() and np.isfinite(found.got[wrong]).all():
        return "finite where -inf is right"
    return ""


def _describe_same_rows(failure: Failure, found: Sample) -> str:
    """Describe rows or keys that are all equal although the right ones differ; empty if they are not."""
    axis = next((failure.letters.index(letter) for letter in "TS" if letter in failure.letters), None)
    if axis is None or failure.got.shape[axis] < MIN_WRONG or failure.letters[-1] not in DEPTH_LETTERS:
        return ""
    first = list(found.index)
    first[axis] = np.full_like(first[axis], int(found.index[axis].min()))
    differ = np.ptp(failure.expected.value, axis=axis).any()
    noun = "row" if "T" in failure.letters else "key"
    same = found.got.any() and np.array_equal(found.got, failure.values[tuple(first)])
    return f"every {noun} the same" if same and differ and len(np.unique(found.index[axis])) >= MIN_WRONG else ""
