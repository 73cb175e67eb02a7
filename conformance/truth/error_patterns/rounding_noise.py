"""Recognise errors that look like rounding: values with fewer bits, or errors scattered evenly in both directions.

The thresholds separate two groups of measured errors. The errors of the first group come from probabilities rounded to
bf16 and f16, in a dozen cases. Those of the second come from a lost key, a key too many, and a scale that is 0.1% or 2%
off.

| | rounding | other errors |
|---|---|---|
| median error, in root mean squares | 0.5 to 0.7 | below 0.3, or |
| correlation with the right values | at most 0.10 | 0.28 and more, or |
| share that one cause explains, relative to normal numbers | at most 2.0 | 2.2 to 22 |
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from conformance.truth.error_patterns.failure import DEPTH_LETTERS
from conformance.truth.error_patterns.fitting import MIN_EXPLAINED, Sample

_LOW_PRECISION = (("bf16", ml_dtypes.bfloat16, 8), ("f16", np.float16, 11))
_MIN_ELEMENTS = 256
_MAX_RELATIVE = 2.0**-5  # largest error relative to the values: no float format in use rounds by more
_MAX_ROWS = 256
_MIN_EACH_WAY = 8
_MAX_ROW_RATIO = 4.0  # largest ratio of the 90% quantile of the rows' errors to the 10% quantile
_MAX_OUTLIER = 6.0  # largest 99% quantile of the elements' errors, in root mean squares
_MIN_MEDIAN = 0.35  # smallest median of the elements' errors, in root mean squares; 0.67 for normal numbers
_MAX_CORRELATION = 0.15  # largest mean, in root mean squares, and largest correlation with the right values
_MAX_ONE_CAUSE = 2.5  # largest share of a head's squared errors in one rank-one matrix, relative to normal numbers


def describe_rounded(found: Sample) -> str:
    """Describe f32 results that are rounded to bf16 or f16; empty if they are not.

    Every value must be exact in that format. Nearly all values must be within one rounding of the right ones.
    """
    if found.failure.got.dtype != np.float32 or found.got.size < _MIN_ELEMENTS or not np.isfinite(found.got).all():
        return ""
    for name, dtype, bits in _LOW_PRECISION:
        with np.errstate(over="ignore"):
            kept = found.got.astype(np.float32).astype(dtype).astype(np.float64)
        near = np.abs(found.got - found.right) <= 2.0**-bits * np.abs(found.right) + found.tolerance(
            found.right, found.bound
        )
        if (
            np.array_equal(kept, found.got)
            and near.mean() >= MIN_EXPLAINED
            and np.count_nonzero(found.got) >= _MIN_ELEMENTS
        ):
            return f"rounded to {name}"
    return ""


def describe_scattered(found: Sample) -> str:
    """Describe errors that scatter in both directions, alike in all rows, without large outliers; empty otherwise."""
    error, right = found.got - found.right, found.right
    if found.failure.letters[-1] not in DEPTH_LETTERS:  # residuals have only one error in each row
        return ""
    if found.got.size < _MIN_ELEMENTS or not np.isfinite(error).all() or not np.isfinite(right).all():
        return ""
    size = float(np.sqrt(np.mean(right**2)))
    rms = float(np.sqrt(np.mean(error**2)))
    if size == 0 or not 0 < rms <= _MAX_RELATIVE * size:
        return ""
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.where(found.bound > 0, error / found.bound, 0.0)
    typical = float(np.sqrt(np.mean(scaled**2)))
    if abs(scaled.mean()) > _MAX_CORRELATION * typical or abs(np.corrcoef(error, right)[0, 1]) > _MAX_CORRELATION:
        return ""
    middle, most = np.quantile(np.abs(scaled), (0.5, 0.99))
    if middle < _MIN_MEDIAN * typical or most > _MAX_OUTLIER * typical or not _is_even(found) or _has_one_cause(found):
        return ""
    return f"scattered like rounding, about 2^{np.log2(rms / size):.0f} of the values"


def _is_even(found: Sample) -> bool:
    """Check whether the errors of all rows have a similar size, in units of their bounds."""
    failure = found.failure
    flat = np.unique(np.ravel_multi_index(found.index[:-1], failure.got.shape[:-1]))
    rows = np.unravel_index(flat[:: len(flat) // _MAX_ROWS | 1], failure.got.shape[:-1])
    scaled = (failure.values[rows] - failure.expected.value[rows]) / failure.expected.bound[rows]
    sizes = np.sqrt(np.mean(np.nan_to_num(scaled) ** 2, axis=1))
    low, high = np.quantile(sizes, (0.1, 0.9))
    return bool(high <= _MAX_ROW_RATIO * low)


def _has_one_cause(found: Sample) -> bool:
    """Check whether the errors of a head are multiples of one vector, as if one key were lost."""
    failure = found.failure
    if failure.letters[1:3] not in ("TN", "SK"):
        return False
    batch, head = int(found.index[0][0]), int(found.index[2][0])
    place = (batch, slice(None, _MAX_ROWS), head)
    errors = failure.values[place] - failure.expected.value[place]
    sizes = np.sqrt(np.mean(errors**2, axis=1, keepdims=True))
    errors = errors[sizes[:, 0] > 0] / sizes[sizes > 0][:, None]
    if min(errors.shape) < _MIN_EACH_WAY or not np.isfinite(errors).all():
        return False
    energy = np.linalg.svd(errors, compute_uv=False) ** 2
    rows, columns = errors.shape
    of_normal = (np.sqrt(rows) + np.sqrt(columns)) ** 2 / (rows * columns)
    return bool(energy[0] > _MAX_ONE_CAUSE * of_normal * energy.sum())
