"""Recognise results that are a multiple of the right ones, or off by a constant.

The factor may be one for all elements, or one for each row, head or batch row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from conformance.truth.error_patterns.failure import Failure
from conformance.truth.error_patterns.fitting import MAX_ENERGY_LEFT, MIN_EXPLAINED, Sample, measure_distance

_RELATIVE_TOLERANCE = 2e-3  # relative distance at which a number counts as a known one; known ones differ by 2% or more
_MIN_COLUMNS = 8  # fewest columns of a row for which a fitted factor of its own is evidence
_MAX_CHANCE_SHARE = 0.3  # largest share of rows that may also fit as multiples of the neighbouring row
_DIGITS = 4


def describe_multiple(sample: Sample) -> str:
    """Describe a multiple of the right values, with the known factors that it may be; empty if it is none."""
    found = _fit_factor(sample)
    if found is None:
        return ""
    near = [known for known in (-1.0, *_list_factors(sample.failure).values()) if _is_near(found, known)]
    # A known factor is not fitted to the values, so fewer values suffice.
    if not any(_fits_factor(sample, known, parameters=0) for known in near) and not _fits_factor(
        sample, found, parameters=1
    ):
        return ""
    if _is_near(found, -1.0):
        return "minus the right value: the sign is wrong"
    return f"{_format_number(found)} times the right value{_format_known_names(found, _list_factors(sample.failure))}"


def _fits_factor(sample: Sample, factor: float, *, parameters: int) -> bool:
    """Check whether the right values times a factor explain the errors."""
    return sample.fits(factor * sample.right, max(1.0, abs(factor)) * sample.bound, parameters=parameters)


def _is_near(value: float, known: float) -> bool:
    """Check whether a number equals a known one up to the tolerance; 0 and 1 are no explanation and never count."""
    return known not in (0, 1) and abs(value - known) <= _RELATIVE_TOLERANCE * abs(known)


def describe_offset(sample: Sample) -> str:
    """Describe a constant offset, with the known numbers that it may be; empty if the errors differ."""
    errors = (sample.got - sample.right)[sample.wrong]
    if not errors.size or not np.isfinite(errors).all():
        return ""
    found = float(np.median(errors))
    # The bounds belong to the right values. They hold for the shifted values only if the offset is not the larger part.
    if found == 0 or not sample.fits(sample.right + found, parameters=1):
        return ""
    size, way = abs(found), "large" if found > 0 else "small"
    return f"{_format_number(size)} too {way}{_format_known_names(size, _list_offsets(sample.failure))}"


def describe_row_multiples(sample: Sample) -> str:
    """Describe rows that are each the right row times a factor, as if weights did not add up to 1; empty otherwise."""
    failure = sample.failure
    if failure.unit_letters == failure.letters or failure.got.shape[-1] < _MIN_COLUMNS:
        return ""
    flat = np.ravel_multi_index(sample.index[:-1], failure.got.shape[:-1])
    rows = np.unique(flat)[:: max(1, len(np.unique(flat)) // 512)]
    index = np.unravel_index(rows, failure.got.shape[:-1])
    got, right, bound = (x[index] for x in (failure.values, failure.expected.value, failure.expected.bound))
    wrong = failure.wrong[index]
    if not np.isfinite(got).all() or not np.isfinite(right).all():
        return ""
    slopes = _fit_row_factors(got, right, bound)
    predicted, widened = slopes[:, None] * right, np.maximum(1, np.abs(slopes))[:, None] * bound
    if not _do_rows_fit(failure, got, right, bound, predicted, widened, wrong):
        return ""
    # If the right rows are multiples of one another, every row fits with some factor. Such a fit proves nothing.
    beside = np.roll(right, 1, axis=0)
    by_neighbour = _fit_row_factors(got, beside, bound)[:, None] * beside
    if len(rows) > 1 and (np.abs(got - by_neighbour) <= failure.limit * widened).all(axis=1).mean() > _MAX_CHANCE_SHARE:
        return ""
    noun = "key" if "S" in failure.letters else "row"
    return f"each {noun} the right one times a factor of its own, {_format_range(slopes[wrong.any(axis=1)])}"


def describe_multiples_along(sample: Sample, letter: str, noun: str) -> str:
    """Describe heads or batch rows that are each the right one times a factor of its own; empty if they are not."""
    failure = sample.failure
    if letter not in failure.letters:
        return ""
    places = sample.index[failure.letters.index(letter)]
    slopes, predicted, widened = {}, sample.right.copy(), sample.bound.copy()
    for here in np.unique(places):
        chosen = places == here
        slope = _fit_factor(sample.only(chosen))
        if slope is None:
            return ""
        slopes[int(here)] = slope
        predicted[chosen] *= slope
        widened[chosen] *= max(1.0, abs(slope))
    if not 2 <= len(slopes) <= sample.right.size // _MIN_COLUMNS**2 or not sample.fits(
        predicted, widened, parameters=len(slopes)
    ):
        return ""
    listed = ", ".join(_format_number(slope) for slope in slopes.values())
    told = listed if len(slopes) <= 8 else _format_range(np.array(list(slopes.values())))
    return f"each {noun} the right one times a factor of its own, {told}"


def _do_rows_fit(
    failure: Failure,
    got: np.ndarray,
    right: np.ndarray,
    bound: np.ndarray,
    predicted: np.ndarray,
    widened: np.ndarray,
    wrong: np.ndarray,
) -> bool:
    """Check whether rows fit, each with a factor of its own: one column determines it, the other columns must agree.

    Args:
      got: what the rows hold, `[rows, columns]`.
      predicted: the right values times each row's factor.
    """
    tolerance = failure.limit * np.maximum(bound, widened)
    with np.errstate(divide="ignore", invalid="ignore"):
        close = (np.abs(got - predicted) <= tolerance) | (got == predicted)
    before, after = (measure_distance(tolerance, got, x) for x in (right, predicted))
    if np.sum(after[close] ** 2) > MAX_ENERGY_LEFT * np.sum(before[close] ** 2):
        return False
    explained = close & wrong
    if not wrong.any() or close.mean() < MIN_EXPLAINED or explained.sum() < MIN_EXPLAINED * wrong.sum():
        return False
    if (np.abs(predicted[explained]) <= tolerance[explained]).mean() > 0.5:  # zeros would fit most predictions too
        return False
    decades = np.log10(np.clip(before, 1.0, None))
    decades[~explained] = 0
    # The largest error of each row determines its factor, so it is no evidence. The other errors of most wrong rows
    # must be strong evidence.
    left = decades.sum(axis=1) - decades.max(axis=1)
    return bool(np.median(left[wrong.any(axis=1)]) >= 8)


def _fit_factor(sample: Sample) -> float | None:
    """Fit the factor by which the results differ from the right values.

    Only the half of the right values with the largest magnitudes counts. Returns None if no such value is usable: the
    right value must not be zero, and both values must be finite.
    """
    large = np.abs(sample.right) > np.median(np.abs(sample.right)) if sample.right.size > 2 else sample.right != 0
    large &= np.isfinite(sample.got) & np.isfinite(sample.right) & (sample.right != 0)
    if not large.any():
        return None
    return _refine_factor(sample.got[large], sample.right[large], sample.bound[large])


def _refine_factor(got: np.ndarray, right: np.ndarray, bound: np.ndarray) -> float:
    """Fit a factor by weighted least squares over the elements that are near the median quotient's prediction."""
    first = float(np.median(got / right))
    near = np.abs(got - first * right) <= np.median(np.abs(got - first * right)) * 4
    weights = 1 / np.maximum(bound[near], np.finfo(float).tiny ** 0.25) ** 2
    return float(np.sum(weights * got[near] * right[near]) / np.sum(weights * right[near] ** 2))


def _fit_row_factors(got: np.ndarray, right: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """Fit a factor for each row by weighted least squares."""
    weights = 1 / np.maximum(bound, np.finfo(float).tiny ** 0.25) ** 2
    squares = np.sum(weights * right**2, axis=1)
    return np.where(squares > 0, np.sum(weights * got * right, axis=1) / np.where(squares > 0, squares, 1), 1.0)


def _list_factors(failure: Failure) -> Mapping[str, float]:
    """List factors that common mistakes introduce, by name: bases of logarithms, scales, the depth, a group's size."""
    problem = failure.problem
    depth, group = problem.q.shape[3], failure.group
    basic = {
        "log2(e)": math.log2(math.e),
        "ln(2)": math.log(2),
        "sqrt(H)": math.sqrt(depth),
        "H": depth,
        "the group's size": group,
        "the scale": problem.effective_scale,
        "scale^2": problem.effective_scale**2,
    }
    if problem.soft_cap is not None:
        basic["the soft cap"] = problem.soft_cap
    upside_down = {f"1/{name}": 1 / value for name, value in basic.items() if name not in ("log2(e)", "ln(2)")}
    if problem.scale is None:  # then the scale is 1/sqrt(H), which is listed already
        for name in ("the scale", "scale^2"):
            del basic[name], upside_down[f"1/{name}"]
    return basic | upside_down


def _list_offsets(failure: Failure) -> Mapping[str, float]:
    """List offsets that common mistakes introduce, by name: logarithms of 2, the depth and the length, the soft cap."""
    problem = failure.problem
    found = {"ln(2)": math.log(2), "ln(H)": math.log(problem.q.shape[3]), "ln(S)": math.log(problem.k.shape[1])}
    if problem.soft_cap is not None:
        found["the soft cap"] = problem.soft_cap
    return found


def _format_known_names(value: float, numbers: Mapping[str, float]) -> str:
    """Format the names of the known numbers that a value may be, in parentheses; empty if there is none."""
    names = [name for name, known in numbers.items() if _is_near(value, known)]
    return f" ({' or '.join(names)})" if names else ""


def _format_range(values: np.ndarray) -> str:
    """Format the smallest and the largest value."""
    return f"{_format_number(float(values.min()))} to {_format_number(float(values.max()))}"


def _format_number(value: float) -> str:
    """Format a number with a few digits."""
    return f"{value:.{_DIGITS}g}"


def iter_factors(sample: Sample) -> Iterator[str]:
    """Yield descriptions by factors and offsets, the plainest first; those that do not fit are empty."""
    yield describe_multiple(sample)
    yield describe_offset(sample)
    yield describe_multiples_along(sample, "N", "head")
    yield describe_multiples_along(sample, "K", "key/value head")
    yield describe_multiples_along(sample, "B", "batch row")
    yield describe_row_multiples(sample)
