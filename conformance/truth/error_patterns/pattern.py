"""Describe an error in one line: where the result is wrong, and what it holds there.

`find_pattern` combines the locations of `locations.py` with the kinds of values of `value_patterns.py`. Records and
reports hold the line.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from conformance.truth.error_patterns.failure import Failure
from conformance.truth.error_patterns.locations import find_location
from conformance.truth.error_patterns.value_patterns import describe_displaced, describe_values

_MIN_ZEROS = 16  # one or two zeros may occur by chance in bf16 and f16


@dataclasses.dataclass(frozen=True)
class Pattern:
    """The description of an error, empty if nothing fits, and the sizes of the blocks that the error follows, or 0."""

    words: str = ""
    blocks: tuple[int, int] = (0, 0)


def find_pattern(failure: Failure) -> Pattern:
    """Describe where a result is wrong and what it holds there. The description is empty if nothing fits."""
    with np.errstate(all="ignore"):  # wrong results may be huge, infinite or NaN
        return _find_pattern(failure)


def _find_pattern(failure: Failure) -> Pattern:
    """Find the description: first NaN and infinity, then the location of the error, then the values there."""
    lost = failure.wrong & ~np.isfinite(failure.values)
    if lost.any():
        nan, infinite = np.isnan(failure.values[lost]).any(), np.isinf(failure.values[lost]).any()
        what = "NaN and infinity" if nan and infinite else "NaN" if nan else "infinity"
        return _find_special_values(failure, lost, what) or Pattern(f"{what} in {_format_share(failure, lost)}")
    where = find_location(failure)
    if where is None:
        zeros = failure.wrong & (failure.values == 0)
        if what := describe_values(failure, np.ones((), bool)):
            return Pattern(what)
        return (_find_special_values(failure, zeros, "zero") if zeros.sum() >= _MIN_ZEROS else None) or Pattern()
    if what := describe_displaced(failure):  # fitted to all elements, since some may keep their place
        return Pattern(what)
    what = describe_values(failure, where.elements)
    # Right rows outside would fit "a factor of its own" too, namely 1. So that description is not tested on them.
    if what and "of its own" not in what and _holds_outside(failure, where.elements, what):
        return Pattern(what)
    only = "" if where.words.startswith(("all ", "every ")) else "only "
    return Pattern(f"{only}{where.words}" + (f"; there {what}" if what else ""), where.blocks)


def _holds_outside(failure: Failure, inside: np.ndarray, what: str) -> bool:
    """Check whether right elements outside the location fit the description too; then the location is dropped."""
    elements = np.broadcast_to(inside, failure.got.shape) & failure.informative
    outside = np.flatnonzero(failure.informative & ~elements)
    within = np.flatnonzero(elements)
    mixed = np.zeros(failure.got.size, bool)
    mixed[outside] = True
    mixed[within[:: max(1, len(within) // max(1, len(outside)))]] = True
    return describe_values(failure, mixed.reshape(failure.got.shape)) == what


def _find_special_values(failure: Failure, elements: np.ndarray, what: str) -> Pattern | None:
    """Describe the location of elements that hold a special value, such as NaN; None if they have no location."""
    if np.array_equal(elements, failure.judged):
        return Pattern(f"{what} everywhere")
    where = find_location(failure, elements)
    if where is None:
        return None
    only = "" if where.words.startswith(("all ", "every ")) else "only "
    other = "; other values are wrong too" if (failure.wrong & ~elements).any() else ""
    if other and where.words.startswith("one "):  # most of the error is elsewhere
        return None
    return Pattern(f"{what}, {only}{where.words}{other}", where.blocks)


def _format_share(failure: Failure, elements: np.ndarray) -> str:
    """Format which share of the judged values the given elements are, and whether other values are wrong too."""
    part = elements.sum() / failure.judged.sum()
    other = "; other values are wrong too" if (failure.wrong & ~elements).any() else ""
    return f"{f'{part:.0%}' if part >= 0.01 else 'less than 1%'} of the values{other}"
