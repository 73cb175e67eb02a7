"""The pattern of an error in one line: where it is, and what stands there."""

from __future__ import annotations

import dataclasses

import numpy as np

from conformance.truth.error_patterns.failure import Failure
from conformance.truth.error_patterns.locations import find_location
from conformance.truth.error_patterns.value_patterns import describe_displaced, describe_values

_MIN_ZEROS = 16  # in a narrow dtype one or two may come about by themselves


@dataclasses.dataclass(frozen=True)
class Pattern:
    """What fits, in words; empty where nothing does. `blocks` are the sizes that its place goes by, or 0."""

    words: str = ""
    blocks: tuple[int, int] = (0, 0)


def find_pattern(failure: Failure) -> Pattern:
    """The place and the form of an error."""
    with np.errstate(all="ignore"):  # what is wrong may be of any size, and no number
        return _find_pattern(failure)


def _find_pattern(failure: Failure) -> Pattern:
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
    if what := describe_displaced(
        failure
    ):  # with what is right where it stands, such as heads that change places with none
        return Pattern(what)
    what = describe_values(failure, where.elements)
    # A factor of its own that a right row has is 1, and says nothing of the place.
    if what and "of its own" not in what and _holds_outside(failure, where.elements, what):
        return Pattern(what)
    only = "" if where.words.startswith(("all ", "every ")) else "only "
    return Pattern(f"{only}{where.words}" + (f"; there {what}" if what else ""), where.blocks)


def _holds_outside(failure: Failure, inside: np.ndarray, what: str) -> bool:
    """Whether what is right outside has the form as well, as zero has every factor: then the place says nothing."""
    elements = np.broadcast_to(inside, failure.got.shape) & failure.informative
    outside = np.flatnonzero(failure.informative & ~elements)
    within = np.flatnonzero(elements)
    mixed = np.zeros(failure.got.size, bool)
    mixed[outside] = True
    mixed[within[:: max(1, len(within) // max(1, len(outside)))]] = True
    return describe_values(failure, mixed.reshape(failure.got.shape)) == what


def _find_special_values(failure: Failure, elements: np.ndarray, what: str) -> Pattern | None:
    """Where the elements are that hold something that no right one does, none if they are in no place."""
    if np.array_equal(elements, failure.judged):
        return Pattern(f"{what} everywhere")
    where = find_location(failure, elements)
    if where is None:
        return None
    only = "" if where.words.startswith(("all ", "every ")) else "only "
    other = "; other values are wrong too" if (failure.wrong & ~elements).any() else ""
    if other and where.words.startswith("one "):  # the least of it
        return None
    return Pattern(f"{what}, {only}{where.words}{other}", where.blocks)


def _format_share(failure: Failure, elements: np.ndarray) -> str:
    part = elements.sum() / failure.judged.sum()
    other = "; other values are wrong too" if (failure.wrong & ~elements).any() else ""
    return f"{f'{part:.0%}' if part >= 0.01 else 'less than 1%'} of the values{other}"
