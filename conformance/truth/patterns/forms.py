"""What a wrong result holds instead: no numbers, zeros, a constant, multiples, right values elsewhere, rounding."""

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
    """Right values that stand elsewhere, what is right by chance among them; empty where they do not."""
    whole = sample(failure, np.ones((), bool))
    return next((words for words in _displaced(whole) if words), "") if whole.wrong.any() else ""


def _displaced(found: Sample) -> Iterator[str]:
    """All that may be said of right values that stand elsewhere."""
    yield from another_result(found)
    yield from moved(found)


def form(failure: Failure, elements: np.ndarray) -> str:
    """What stands in a place, in words; empty where nothing of the list fits."""
    whole = sample(failure, elements)
    if not whole.wrong.any():  # too much by the root mean square alone
        return rounded(whole) or scattered(whole)
    return next((words for words in _forms(whole) if words), "")


def _forms(whole: Sample) -> Iterator[str]:
    """The most particular first."""
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
    return f"what is wrong is {words}" if words else ""


def _zero(found: Sample) -> str:
    zeros = not found.got.any()
    return "zero" if zeros and found.wrong.sum() >= min(FEWEST, found.got.size) and found.right.any() else ""


def _alike(found: Sample) -> str:
    """One value in place of many."""
    right = _finite_of(found.right)
    if found.got.size < _FEWEST_ALIKE or not (found.got == found.got[0]).all() or (np.ptp(right) == 0 and right.any()):
        return ""
    return f"one value everywhere, {found.got[0]:.4g}"


def _finite_of(values: np.ndarray) -> np.ndarray:
    finite = values[np.isfinite(values)]
    return finite if finite.size else np.zeros(1)


def _finite(found: Sample) -> str:
    """Numbers where a row without keys must say so."""
    wrong = found.wrong
    if wrong.any() and np.isneginf(found.right[wrong]).all() and np.isfinite(found.got[wrong]).all():
        return "finite where -inf is right"
    return ""


def _same_rows(failure: Failure, found: Sample) -> str:
    """Rows that do not differ, in all of the place."""
    axis = next((failure.letters.index(letter) for letter in "TS" if letter in failure.letters), None)
    if axis is None or failure.got.shape[axis] < FEWEST or failure.letters[-1] not in DEPTHS:
        return ""
    first = list(found.index)
    first[axis] = np.full_like(first[axis], int(found.index[axis].min()))
    differ = np.ptp(failure.expected.value, axis=axis).any()
    noun = "row" if "T" in failure.letters else "key"
    same = found.got.any() and np.array_equal(found.got, failure.values[tuple(first)])
    return f"every {noun} the same" if same and differ and len(np.unique(found.index[axis])) >= FEWEST else ""
