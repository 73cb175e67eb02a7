"""The pattern of an error in one line: where it is, and what stands there."""

from __future__ import annotations

import dataclasses

import numpy as np

from conformance.truth.patterns.failure import Failure
from conformance.truth.patterns.forms import form
from conformance.truth.patterns.places import place


@dataclasses.dataclass(frozen=True)
class Pattern:
    """What fits, in words; empty where nothing does. `block` is the size of block that the place goes by, or 0."""

    words: str = ""
    block: int = 0


def pattern(failure: Failure) -> Pattern:
    """The place and the form of an error."""
    with np.errstate(all="ignore"):  # what is wrong may be of any size, and no number
        return _pattern(failure)


def _pattern(failure: Failure) -> Pattern:
    lost = failure.judged & ~np.isfinite(failure.values) & (failure.ratios > failure.limit)
    if lost.any():
        return _lost(failure, lost)
    where = place(failure)
    what = form(failure, np.ones((), bool) if where is None else where.elements)
    if where is None:
        return Pattern(what)
    return Pattern(f"only {where.words}" + (f"; there {what}" if what else ""), where.block)


def _lost(failure: Failure, lost: np.ndarray) -> Pattern:
    """NaN and infinity, which no number can be said of."""
    nan, infinite = np.isnan(failure.values[lost]).any(), np.isinf(failure.values[lost]).any()
    what = "NaN and infinity" if nan and infinite else "NaN" if nan else "infinity"
    other = "; other values are wrong too" if (failure.wrong & ~lost).any() else ""
    if np.array_equal(lost, failure.judged):
        return Pattern(f"{what} everywhere")
    where = place(failure, lost)
    if where is None:
        return Pattern(f"{what} in {_share(lost.sum() / failure.judged.sum())} of the values{other}")
    return Pattern(f"{what}, only {where.words}{other}", where.block)


def _share(part: float) -> str:
    return f"{part:.0%}" if part >= 0.01 else "less than 1%"
